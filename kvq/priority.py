"""Priority of threads whose work may wait for an engine's steps."""

import os
import sys
import threading


def step_back(niceness: int) -> None:
    """Let this thread run after others where Linux shares out cores: 10 leaves it a tenth of a busy one."""
    if sys.platform == "linux":  # where each thread has its own niceness
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
