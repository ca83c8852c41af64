"""A tree of files: similar names, paths, owners and checksums."""

from random import Random
from typing import Any

from kvq.traces.tasks import words
from kvq.traces.tasks.table import Domain, Row
from kvq.traces.tasks.talk import Request, choice, kind, tool

_MODES = ("read_only", "private", "public")
_PATH = kind("string", "The whole path, as listed. It begins with /home/.")
_TOOLS = [
    tool("list_files", "List all files below a folder.", "folder"),
    tool("read_file", "Show what a file contains.", path=_PATH),
    tool("move_file", "Move a file to another folder.", "folder", path=_PATH),
    tool("delete_file", "Delete a file.", path=_PATH),
    tool("verify_file", "Compare a file with a checksum.", "checksum", path=_PATH),
    tool("set_mode", "Say who may use a file.", path=_PATH, mode=choice(*_MODES)),
]


def _folder(random: Random) -> str:
    first, second = random.sample(words.FOLDERS, 2)
    return f"/home/{first}/{random.randint(2019, 2026)}/{second}"


def _row(random: Random) -> Row:
    name = f"{random.choice(words.ITEMS).replace(' ', '_')}_{random.randint(100, 999)}.txt"
    return {
        "name": name,
        "path": f"{_folder(random)}/{name}",
        "checksum": f"{random.getrandbits(48):012x}",
        "owner": random.choice(words.PEOPLE),
        "note": words.note(random),
    }


def _requests(random: Random, file: Row, other: Row, last: Any) -> list[Request]:
    path, checksum, named = file["path"], file["checksum"], f"the file {file['name']}"
    folder, mode = _folder(random), random.choice(_MODES)
    moved, text = f"{folder}/{file['name']}", f"To {other['owner']}: {words.note(random)}."
    if last is not None:
        asked, result = f"Set the mode of the file that was just moved to {mode}.", f"{last} is {mode}"
        return [Request(asked, "set_mode", {"path": last, "mode": mode}, result)]
    verify, move = (
        f"Verify {named}, by its path, with its listed checksum.",
        f"Move {named} to the folder {folder}, by its path.",
    )
    return [
        Request(f"Read {named}, by its path.", "read_file", {"path": path}, text),
        Request(f"Delete {named}, by its path.", "delete_file", {"path": path}, f"deleted {path}"),
        Request(verify, "verify_file", {"checksum": checksum, "path": path}, f"{path} is as it was"),
        Request(move, "move_file", {"folder": folder, "path": path}, f"moved to {moved}", last=moved),
    ]


_OPENING = Request("List all files below /home.", "list_files", {"folder": "/home"})
FILES = Domain(tools=_TOOLS, opening=_OPENING, row=_row, requests=_requests)
