"""A tree of files: paths with owners, sizes and checksums."""

from random import Random
from typing import Any

from kvq.traces.tasks import words
from kvq.traces.tasks.table import Domain, Row
from kvq.traces.tasks.talk import Request, choice, tool

_MODES = ("read_only", "private", "public")
_TOOLS = [
    tool("list_files", "List all files below a folder.", "folder"),
    tool("read_file", "Show what a file contains.", "path"),
    tool("move_file", "Move a file to another folder.", "path", "folder"),
    tool("delete_file", "Delete a file.", "path"),
    tool("verify_file", "Compare a file with a checksum.", "path", "checksum"),
    tool("set_mode", "Say who may use a file.", "path", mode=choice(*_MODES)),
]


def _folder(random: Random) -> str:
    first, second = random.sample(words.FOLDERS, 2)
    return f"/home/{first}/{random.randint(2019, 2026)}/{second}"


def _row(random: Random) -> Row:
    name = f"{random.choice(words.ITEMS).replace(' ', '_')}_{random.randint(100, 999)}.txt"
    return {
        "path": f"{_folder(random)}/{name}",
        "size": f"{random.randint(10_000, 99_999)} bytes",
        "owner": random.choice(words.PEOPLE),
        "checksum": f"{random.getrandbits(48):012x}",
        "note": words.note(random),
    }


def _requests(random: Random, file: Row, other: Row, last: Any) -> list[Request]:
    path, folder, mode = file["path"], _folder(random), random.choice(_MODES)
    named = random.choice((f"of {file['size']}", f"with the checksum {file['checksum']}"))
    moved, text = f"{folder}/{path.rpartition('/')[2]}", f"To {other['owner']}: {words.note(random)}."
    verify = f"Verify the file of {file['size']} with the checksum that is listed for it."
    checked = {"path": path, "checksum": file["checksum"]}
    found = [
        Request(f"Read the file {named}.", "read_file", {"path": path}, text, "This is the file."),
        Request(f"Delete the file {named}.", "delete_file", {"path": path}, f"deleted {path}"),
        Request(verify, "verify_file", checked, f"{path} has this checksum"),
        Request(
            f"Move the file {named} to the folder {folder}.",
            "move_file",
            {"path": path, "folder": folder},
            f"moved to {moved}",
            last=moved,
        ),
    ]
    if last:
        asked, result = f"Set the mode of the file that was just moved to {mode}.", f"{last} is {mode}"
        found += [Request(asked, "set_mode", {"path": last, "mode": mode}, result)] * 4
    return found


FILES = Domain(
    tools=_TOOLS,
    opening=Request("List all files below /home.", "list_files", {"folder": "/home"}, ""),
    row=_row,
    keys=(("path",), ("size",), ("checksum",)),
    requests=_requests,
)
