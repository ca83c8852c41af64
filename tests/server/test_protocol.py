"""What connections have from their listening socket."""

import socket

from kvq.server.protocol import prepare


def test_answers_are_written_at_once():
    """An answer's body does not wait for the acknowledgement of its head."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        prepare(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
