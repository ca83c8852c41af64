"""What no file of the package may do, read from its source."""

import ast
from pathlib import Path

import pytest

import kvq

PACKAGE = Path(kvq.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf8")) for path in FILES}

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
CLIENTS = {
    "requests", "httpx", "httpx2", "aiohttp", "urllib3", "urllib.request", "http.client", "ftplib", "smtplib",
    "telnetlib", "xmlrpc", "xmlrpc.client", "huggingface_hub", "websockets",
}  # fmt: skip


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_all_of_the_package_is_read():
    assert len(FILES) > 200
    assert "server/app.py" in TREES


@pytest.mark.parametrize("name", TREES)
def test_nothing_unpickles_evaluates_or_calls_a_shell(name):
    tree = TREES[name]
    bad = [f"{line}: imports {module}" for module, line in imports(tree) if module.split(".")[0] in PICKLES]
    for called, node in calls(tree):
        words = {keyword.arg: keyword.value for keyword in node.keywords}
        if called in ("eval", "exec", "compile", "__import__"):
            bad.append(f"{node.lineno}: {called}")
        if called in ("torch.load", "torch.save", "numpy.load", "np.load"):
            bad.append(f"{node.lineno}: {called}")
        if called in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"):
            bad.append(f"{node.lineno}: {called}")
        if called.startswith("subprocess.") and "shell" in words:
            bad.append(f"{node.lineno}: {called} with shell")
        if "trust_remote_code" in words and ast.unparse(words["trust_remote_code"]) != "False":
            bad.append(f"{node.lineno}: trust_remote_code")
        if called == "yaml.load":
            bad.append(f"{node.lineno}: {called}")
    assert not bad


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith("server/")])
def test_the_server_asks_nobody_outside(name):
    known = CLIENTS - {"httpx2"} if name == "server/overflow.py" else CLIENTS  # where its operator says
    bad = [f"{line}: imports {module}" for module, line in imports(TREES[name]) if module in known]
    for called, node in calls(TREES[name]):
        if called.endswith(("create_connection", "socket.connect", "open_unix_connection", "urlopen")):
            bad.append(f"{node.lineno}: {called}")
        is_ours = [keyword.arg for keyword in node.keywords] == ["sock"] and not node.args
        if called.endswith("open_connection") and not is_ours:  # over a socket pair that is there already
            bad.append(f"{node.lineno}: {called}")
    assert not bad


MAKERS = {
    f"torch.{name}"
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "linspace", "logspace", "eye")
}


@pytest.mark.parametrize("name", sorted(TREES))
def test_tensors_say_their_dtype(name):
    """torch's default is the process's: transformers changes it while it loads a model in another thread."""
    for function, node in calls(TREES[name]):
        if function in MAKERS:
            told = [keyword.arg for keyword in node.keywords]
            assert "dtype" in told or None in told, f"{name}:{node.lineno}: {ast.unparse(node)}"
