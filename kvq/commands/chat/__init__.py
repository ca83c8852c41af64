"""`kvq chat`: a conversation in the terminal."""
