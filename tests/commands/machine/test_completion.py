"""Shells complete kvq: the scripts, where they are installed, and what they offer, without torch."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import kvq
from kvq import cli
from kvq.commands.machine import completion
from kvq.commands.machine.completion import MARK, SHELLS

# Completes lines as bash asks for it, one after another in one process.
ASK = """
import contextlib, io, json, os, sys
from kvq import cli

found = {}
for line in json.loads(sys.argv[1]):
    words = line.split(" ")
    os.environ.update(_KVQ_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    raw = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(raw, write_through=True)):
        try:
            cli.main([])
        except SystemExit:
            found[line] = raw.getvalue().decode().split()
print(json.dumps([found, sorted(sys.modules)]))
"""


def ask(lines):
    """What bash is told for each line, and the modules that were loaded for it."""
    command = [sys.executable, "-c", ASK, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found, modules = json.loads(done.stdout)
    return found, {module.partition(".")[0] for module in modules}


def test_commands_options_and_names_complete_without_torch():
    options = [f"kvq {name} --" for name in cli._COMMANDS]
    found, modules = ask(
        [
            *options,
            "kvq ",
            "kvq p",
            "kvq nothing --",
            "kvq serve --kv int4_g",
            "kvq perplexity --kv bf16,k",
            "kvq perplexity --kv bf16,int8/int4_g",
            "kvq serve --kv int8/k",
            "kvq serve --kv kvq.j",
            "kvq bench attention --kv k",
            "kvq chat -ctk k",
            "kvq perplexity --kv = k",
            "kvq plan --gpu h100,h2",
            "kvq plan --model llama-3.1-4",
            "kvq eval ti",
            "kvq serve --model ./models",
            "kvq serve --log-format ",
            "kvq bench en",
            "kvq completion ",
        ]
    )
    assert modules & {"torch", "transformers", "numpy", "rich", "yaml"} == set()
    for line in options:
        assert "plain,--help" in found[line]
    assert found["kvq "] == [f"plain,{name}" for name in cli._COMMANDS]
    assert found["kvq p"] == ["plain,perplexity", "plain,plan"]
    assert "plain,--max-num-seqs" in found["kvq serve --"]
    assert found["kvq serve --kv int4_g"] == ["plain,int4_g32", "plain,int4_g64", "plain,int4_g128"]
    assert found["kvq perplexity --kv bf16,k"] == ["plain,bf16,k8v4"]
    assert found["kvq perplexity --kv bf16,int8/int4_g"] == [
        f"plain,bf16,int8/int4_g{group}" for group in (32, 64, 128)
    ]
    assert found["kvq serve --kv int8/k"] == ["file,int8/k"]  # a pair is no half
    assert found["kvq serve --kv kvq.j"] == ["file,kvq.j"]
    assert found["kvq bench attention --kv k"] == found["kvq perplexity --kv = k"] == ["plain,k8v4"]
    assert found["kvq chat -ctk k"] == []  # a pair is no half
    assert found["kvq plan --gpu h100,h2"] == ["plain,h100,h200"]
    assert found["kvq plan --model llama-3.1-4"] == ["file,llama-3.1-4", "plain,llama-3.1-405b"]
    assert found["kvq eval ti"] == ["file,ti", "plain,tiny", "plain,tiny-draft"]
    assert found["kvq serve --model ./models"] == ["file,./models"]  # a folder or a GGUF file
    assert found["kvq serve --log-format "] == ["plain,text", "plain,json"]
    assert found["kvq bench en"] == ["plain,engine"]
    assert found["kvq completion "] == ["plain,bash", "plain,zsh", "plain,fish"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's own folder, where nothing of shells is set; kvq is on the path."""
    home = tmp_path / "home of one"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR", "SHELL"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "kvq"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvq "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(kvq.__file__).parents[2]))
    return home


def run(*command):
    """What a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(folder):
    """Every file below a folder: its bytes, its mode and when it was written."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns) for path in files}


BASH_ASKS = """
complete -p kvq
for line in "kvq plan --gpu h10" "kvq ge" "kvq perplexity --kv fp32,int4_g1"; do
    COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    _kvq_completion kvq
    echo "${COMPREPLY[@]}"
done
"""


def test_bash_completes_after_one_command(home):
    (home / ".bashrc").write_text("alias ll='ls -l'")  # without an end of line
    (home / ".bashrc").chmod(0o600)
    said = run("bash", "-c", "kvq completion --install; true")  # bash stays, and is asked
    script = home / ".local" / "share" / "kvq" / "completion.bash"
    assert said.splitlines() == [
        f"wrote {script}",
        f"added a line to {home / '.bashrc'}, which reads it",
        "Open a new bash, and try: kvq <Tab>",
    ]
    rules, gpus, commands, formats = run("bash", "-ic", BASH_ASKS).splitlines()
    assert rules.endswith("-F _kvq_completion kvq")
    assert (gpus, commands, formats) == ("h100", "generate", "fp32,int4_g128")
    lines = (home / ".bashrc").read_text().splitlines()
    assert (lines[0], len(lines)) == ("alias ll='ls -l'", 2)
    assert stat.S_IMODE((home / ".bashrc").stat().st_mode) == 0o600

    before = contents(home)
    assert "nothing was changed" in run("bash", "-c", "kvq completion --install; true")
    assert contents(home) == before


@pytest.mark.parametrize(
    ("shell", "script", "startup"),
    [
        ("bash", ".local/share/kvq/completion.bash", ".bashrc"),
        ("zsh", ".local/share/kvq/completion.zsh", ".zshrc"),
        ("fish", ".config/fish/completions/kvq.fish", None),
    ],
)
def test_scripts_go_where_shells_find_them_and_a_second_time_changes_nothing(
    kvq, home, shell, script, startup
):
    status, printed, _ = kvq("completion", shell)
    assert status == 0
    assert printed.startswith(MARK)
    assert kvq("completion", shell, "--install")[0] == 0
    assert set(contents(home)) == {home / name for name in (script, startup) if name is not None}
    assert (home / script).read_text() == printed

    before = contents(home)
    status, said, _ = kvq("completion", shell, "--install")
    assert (status, "nothing was changed" in said) == (0, True)
    assert contents(home) == before
    (home / script).write_text(f"{MARK}\nby an older version\n")
    assert kvq("completion", shell, "--install")[0] == 0
    assert {path: entry[0] for path, entry in contents(home).items()} == {
        path: entry[0] for path, entry in before.items()
    }


def test_folders_that_the_environment_names_are_used(kvq, home, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("ZDOTDIR", str(tmp_path))
    assert kvq("completion", "zsh", "--install")[0] == 0
    assert str(tmp_path / "data" / "kvq" / "completion.zsh") in (tmp_path / ".zshrc").read_text()
    monkeypatch.setenv("XDG_DATA_HOME", "data")  # which XDG's rules make void
    assert kvq("completion", "bash", "--install")[0] == 0
    assert (home / ".local" / "share" / "kvq" / "completion.bash").is_file()


def test_files_that_are_not_kvqs_are_left_alone(kvq, home):
    script = home / ".config" / "fish" / "completions" / "kvq.fish"
    script.parent.mkdir(parents=True)
    script.write_text("complete --command kvq --arguments mine\n")
    before = contents(home)
    status, _, error = kvq("completion", "fish", "--install")
    assert status == 2
    assert f"{script} is there and not by kvq completion; move it away" in error
    assert contents(home) == before


def test_a_linked_startup_file_stays_a_link(kvq, home, tmp_path):
    (tmp_path / "dotfiles").write_text("# mine\n")
    (home / ".bashrc").symlink_to(tmp_path / "dotfiles")
    assert kvq("completion", "bash", "--install")[0] == 0
    assert (home / ".bashrc").is_symlink()
    assert (tmp_path / "dotfiles").read_text().startswith("# mine\nif [ -f ")


def test_a_startup_file_that_takes_nothing_is_named_with_the_line_it_needs(kvq, home):
    (home / ".bashrc").mkdir()
    status, _, error = kvq("completion", "bash", "--install")
    assert status == 2
    assert f"can't write {home / '.bashrc'}" in error
    assert "add this line to it: if [ -f '" in error


def test_the_users_own_shell_is_taken_where_none_called(kvq, home, monkeypatch):
    monkeypatch.setattr(completion, "_process", lambda pid: ("python3", pid - 1))
    status, _, error = kvq("completion")
    assert status == 2
    assert "can't tell which shell this is; name it: kvq completion bash | zsh | fish" in error
    monkeypatch.setenv("SHELL", "/usr/local/bin/fish")
    assert "--command kvq" in kvq("completion")[1]
    callers = {os.getppid(): ("make", 7), 7: ("zsh", 1)}
    monkeypatch.setattr(completion, "_process", callers.get)
    assert "#compdef kvq" in kvq("completion")[1]


def test_unknown_shells_are_refused_with_those_there_are(kvq):
    status, _, error = kvq("completion", "tcsh")
    assert status == 2
    assert all(shell in error for shell in SHELLS)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_after_one_command(home):
    run("zsh", "-c", "kvq completion --install; true")
    assert run("zsh", "-ic", "print $_comps[kvq]").split() == ["_kvq_completion"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_after_one_command(home):
    run("fish", "-c", "kvq completion --install; true")
    asks = "complete -C 'kvq plan --gpu h100,h2'; complete -C 'kvq plan --gpu=h2'"
    assert run("fish", "-c", asks).split() == ["h100,h200", "--gpu=h200"]
