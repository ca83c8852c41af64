"""Models, and the engines that run them, stay in the process that made them: what they hold is in no copy."""

from typing import NoReturn

from kvq.errors import EngineError


class StaysHere:
    """What can't be pickled or copied."""

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise EngineError(
            f"{name} can't be pickled or copied: it holds memory, threads and processes; "
            "pass on the model's folder or name, and make it where it is used"
        )
