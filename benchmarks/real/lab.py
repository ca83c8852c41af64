"""The lab: a folder outside the repository with real models, texts and tasks, and what was measured there."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.real.packages import MODELS
from kvq.errors import ConfigError
from kvq.evals.text import EvalText, decoded

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT.parent / "kvq-real"
EMBEDDED = "tiny"  # the model that needs no lab
_WIKITEXT = Path("wikitext-2") / "test.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lab:
    """Folder of everything that `make real` made."""

    folder: Path = FOLDER
    data: Path = ROOT.parent / "shared" / "data"  # of texts that the lab does not bring

    def model(self, name: str) -> Path | str:
        """Return the argument of `kvq.load` for a model.

        Raises:
            ConfigError: a name that is unknown, or a model that is not there yet.
        """
        if name == EMBEDDED:
            return EMBEDDED
        if name not in MODELS:
            raise ConfigError(f"unknown model {name!r}; there are {', '.join([*MODELS, EMBEDDED])}")
        folder = self.models / name
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"{folder} is no model yet; run make real REAL={self.folder}")
        return folder

    @property
    def models(self) -> Path:
        """The folder of models, each a folder and a .gguf file."""
        return self.folder / "models"

    @property
    def reader(self) -> Path:
        """The folder of packages that transformers needs to read GGUF."""
        return self.folder / "reader"

    @property
    def rivals(self) -> Path:
        """The folder of packages that transformers needs for its quantized caches."""
        return self.folder / "rivals"

    @property
    def node(self) -> Path:
        """The folder of llama.cpp for node."""
        return self.folder / "node" / "node_modules"

    @property
    def baselines(self) -> Path:
        """The folder of what unquantized KV gave."""
        return self.folder / "baselines"

    @property
    def rows(self) -> Path:
        """The file of everything that was measured, a row a line."""
        return self.folder / "rows.jsonl"

    @property
    def problems(self) -> Path:
        """The file of HumanEval's problems."""
        return self.folder / "tasks" / "HumanEval.jsonl.gz"

    def wikitext(self) -> EvalText:
        """WikiText-2's test split.

        Raises:
            ConfigError: it is not there.
        """
        return EvalText(name="WikiText-2 test", text=decoded(self._existing(self.data / _WIKITEXT, "--data")))

    def essays(self) -> EvalText:
        """All essays, in the order of their names.

        Raises:
            ConfigError: they are not there.
        """
        folder = self._existing(self.folder / "tasks" / "essays", "--folder")
        texts = [decoded(path).strip() for path in sorted(folder.glob("*.txt"))]
        return EvalText(name=f"{len(texts)} essays", text="\n\n".join(texts))

    def _existing(self, path: Path, option: str) -> Path:
        if not path.exists():
            raise ConfigError(f"{path} is not there; name the folder that has it with {option}")
        return path
