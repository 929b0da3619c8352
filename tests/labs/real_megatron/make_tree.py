"""Make a small tree of Megatron-LM with rows for one GPU: `python make_tree.py CHECKOUT TREE DATA`.

Each row is one of the checkout's own, made small: few layers, mock data, no Transformer Engine. It
gets two recipes, `lab_<row>_script.yaml` with the script of the recipe that it comes from, and
`lab_<row>_native.yaml` with the program instead.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

CASES = "tests/functional_tests/test_cases"
RECIPES = "tests/test_utils/recipes"
TAKEN = [
    "megatron",
    "tests/__init__.py",
    "tests/functional_tests/__init__.py",
    "tests/functional_tests/shell_test_utils",
    "tests/functional_tests/python_test_utils",
    "examples/__init__.py",
    "examples/inference",
    "examples/rl",
    "examples/t5",
    "pyproject.toml",
    "pretrain_gpt.py",
    "pretrain_hybrid.py",
    "train_rl.py",
    "gpt_builders.py",
    "hybrid_builders.py",
    "model_provider.py",
]
PATCHES = (
    # Faults in step 5.
    (
        "megatron/training/training.py",
        r"(def train_step\(.*?\n    args = get_args\(\)\n)",
        r"\1    import lab_fault; lab_fault.step()\n",
    ),
    # The one layer of a hybrid model that no spec can replace needs Transformer Engine.
    (
        "megatron/core/models/hybrid/hybrid_block.py",
        r"import TELayerNormColumnParallelLinear, TENorm",
        (
            r"import TELayerNormColumnParallelLinear\n"
            r"from megatron.core.transformer.torch_norm import WrappedTorchNorm as TENorm"
        ),
    ),
    # GRPO gives every sequence as a packed one, which attention without Transformer Engine refuses.
    (
        "megatron/rl/rl_utils.py",
        r"(\n    pg_collection = get_attr_wrapped_model\(model, .pg_collection.\)\n    cp_group)",
        r"\n    packed_seq_params = None\1",
    ),
    (
        "train_rl.py",
        r"(\n    # Clear RoPE cache)",
        r"\n    packed_seq_params = None\1",
    ),
)
NUM_STEPS = 20
END = "<end>"
TIME_LIMIT_S = 150
# What a row has of these gets the value; the rest of a row stays as it is.
SMALLER = {
    "--num-layers": "4",
    "--hidden-size": "128",
    "--ffn-hidden-size": "256",
    "--num-attention-heads": "8",
    "--num-query-groups": "4",
    "--kv-channels": "16",
    "--seq-length": "256",
    "--max-position-embeddings": "256",
    "--micro-batch-size": "2",
    "--global-batch-size": "8",
    "--train-iters": str(NUM_STEPS),
    "--tensor-model-parallel-size": "1",
    "--pipeline-model-parallel-size": "1",
    "--context-parallel-size": "1",
    "--expert-model-parallel-size": "1",
    "--transformer-impl": "local",
    "--eval-iters": "0",
}
SMALLER_STILL = {
    "--seq-length": "64",
    "--max-position-embeddings": "64",
    "--global-batch-size": "4",
}
SLOWER = 6  # times the limit, where the CPU is taken for a GPU
# Every training gets these: otherwise it needs Transformer Engine, Apex or a file of data.
SET_IN_TRAININGS = {
    "--mock-data": "true",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "1023",
    "--no-persist-layer-norm": "true",
    "--no-masked-softmax-fusion": "true",
    "--no-bias-gelu-fusion": "true",
    "--no-bias-swiglu-fusion": "true",
    "--no-bias-dropout-fusion": "true",
    "--no-rope-fusion": "true",
    "--no-gradient-accumulation-fusion": "true",
}
DROPPED = (
    "data-path|vocab-file|merge-file|tokenizer-model|tiktoken-pattern|async-save|use-persistent-ckpt-worker"
    "|sequence-parallel|num-layers-per-virtual-pipeline-stage"
    "|moe-grouped-gemm|flash-decode|max-tokens-to-oom|tp-comm-overlap"
)
INFERENCE = {
    "--tokenizer-type": "HuggingFaceTokenizer",
    "--tokenizer-model": "lab_tokenizer",
    "--load": "${CHECKPOINT_LOAD_PATH}/model/tiny",
    "--inference-max-seq-length": "256",
    "--num-tokens-to-generate": "16",
    "--prompts": '"Time travel to 2008, and go to a bar."',
    "--no-persist-layer-norm": "true",
    "--no-masked-softmax-fusion": "true",
    "--no-bias-gelu-fusion": "true",
    "--no-bias-dropout-fusion": "true",
    "--no-gradient-accumulation-fusion": "true",
    "--attention-backend": "unfused",
    "--num-attention-heads": "8",
    "--use-mcore-models": "true",
}


@dataclass(frozen=True)
class Row:
    """A row of Megatron-LM's, and what makes it small."""

    case: str
    recipe: str
    values: dict[str, str] = field(default_factory=dict)
    dropped: str = ""
    without: tuple[tuple[str, str], ...] = ()
    checkpoint: str = ""
    is_training: bool = True


GPT = "h100/gpt.yaml"
# Its state_dict() asserts one count of steps, which torch's Adam has none of before the first step.
NOT_RESUMABLE = "use-distributed-optimizer"
ROWS = {
    "dense": Row("gpt/gpt3_mcore_te_tp1_pp1_uniform_full_recompute", GPT),
    "swiglu": Row("gpt/gpt3_mcore_te_tp1_pp4_swiglu", GPT),
    "moe": Row("moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_top2router", "h100/moe.yaml"),
    "hybrid": Row(
        "hybrid/hybrid_mr_mcore_te_tp1_pp1_cp1_dgx_a100_1N8G",
        "h100/mamba.yaml",
        {
            "--hybrid-layer-pattern": "M-M*-",
            "--spec": '"[lab_hybrid local_stack]"',
            "--disable-mamba-mem-eff-path": "true",
            "--mamba-state-dim": "16",
            "--mamba-head-dim": "16",
            "--mamba-num-groups": "2",
        },
    ),
    "resume": Row(
        "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer",
        GPT,
        {"--save-interval": str(NUM_STEPS // 2)},
        dropped=NOT_RESUMABLE,
    ),
    "frozen": Row(
        "gpt/gpt3_mcore_te_tp1_pp1_frozen_resume_torch_dist_dist_optimizer",
        GPT,
        {"--save-interval": str(NUM_STEPS // 2)},
        dropped=NOT_RESUMABLE,
        checkpoint="frozen",
    ),
    "consistency": Row(
        "gpt/gpt3_mcore_reruns_resume_check_grads",
        "h100/gpt-grads.yaml",
        # Two layouts of one GPU: one batch of two, and two of one.
        {"--global-batch-size": "2", "--train-iters": "1"},
        dropped="load|finetune|context-parallel-size",
        without=(
            (r"\nMODEL_ARGS_3:.*", "\n"),
            (r"  MODEL_ARGS_(10|3|4|5):\n(    .*\n)+", ""),
            (r"GPUS_PER_NODE: 2", "GPUS_PER_NODE: 1"),
        ),
    ),
    "release": Row(
        "gpt/gpt3_15b_8t_release",
        GPT,
        {
            "--step-batch-size-schedule": '"0:8"',
            "--train-samples": str(8 * NUM_STEPS),
            "--exit-interval": str(NUM_STEPS),
            "--lr-decay-samples": "1600",
            "--lr-warmup-samples": "16",
            "--save-interval": str(NUM_STEPS // 2),
            "--log-interval": "1",
            "--num-workers": "1",
        },
        dropped="wandb-.*|apply-layernorm-1p|save-retain-interval|no-mmap-bin-files",
    ),
    "gb200": Row(
        "gpt/gpt3_mcore_te_tp1_pp4_vp1_1node",
        "gb200/gpt-1node.yaml",
        {"--normalization": "RMSNorm"},
    ),
    "static": Row(
        "gpt/gpt_static_inference_tp1_pp1_583m_logitsmatch",
        "h100/gpt-static-inference.yaml",
        INFERENCE,
        is_training=False,
    ),
    "dynamic": Row(
        "gpt/gpt_dynamic_inference_tp1_pp1_583m_logitsmatch",
        "h100/gpt-dynamic-inference.yaml",
        INFERENCE
        | {"--inference-dynamic-batching-buffer-size-gb": "1", "--inference-repeat-n": "1"},
        dropped="prompt-file|prompt-file-num-truncate",
        is_training=False,
    ),
    "grpo": Row(
        "gpt/gpt_grpo_basic_function",
        "h100/gpt-grpo.yaml",
        {
            "--load": "${CHECKPOINT_LOAD_PATH}/model/policy",
            "--tokenizer-model": "lab_tokenizer",
            "--vocab-size": "1023",
            "--global-batch-size": "4",
            "--micro-batch-size": "1",
            "--inference-max-seq-length": "256",
            "--inference-dynamic-batching-buffer-size-gb": "1",
            "--inference-dynamic-batching-unified-memory-level": "0",
            "--langrl-env-config": "lab_env.yaml",
            "--transformer-impl": "local",
            "--attention-backend": "unfused",
            "--cuda-graph-impl": "none",
            "--no-persist-layer-norm": "true",
            "--no-bias-swiglu-fusion": "true",
            "--no-bias-dropout-fusion": "true",
            "--no-rope-fusion": "true",
            "--no-gradient-accumulation-fusion": "true",
        },
        dropped="refit-method|rl-inference-.*|rl-use-sequence-packing"
        "|rl-sequence-packing-algo|inference-dynamic-batching-num-cuda-graphs",
        is_training=False,
    ),
}


def case_text(text: str, row: Row, sizes: dict[str, str]) -> str:
    """Change lines of the case; everything else stays as its authors wrote it."""
    for pattern, replacement in row.without:
        text = re.sub(
            pattern, replacement, text, flags=re.DOTALL if pattern.startswith(r"\n") else 0
        )
    dropped = rf"{DROPPED}|{row.dropped}" if row.dropped else DROPPED
    text = re.sub(rf"^  --(?:{dropped}):.*\n", "", text, flags=re.MULTILINE)
    for key, value in sizes.items():
        text = re.sub(rf"^  {key}:.*$", f"  {key}: {value}", text, flags=re.MULTILINE)
    added = ""
    for key, value in ((SET_IN_TRAININGS if row.is_training else {}) | row.values).items():
        line = f"  {key}: {value}"
        escaped = line.replace("\\", r"\\")
        text, count = re.subn(rf"^  {key}:.*$", escaped, text, flags=re.MULTILINE)
        added += "" if count else f"{line}\n"
    return re.sub(
        r"^((?:BASE_MODEL_ARGS|MODEL_ARGS):.*\n)",
        lambda m: m[1] + added,
        text,
        count=1,
        flags=re.MULTILINE,
    )


def recipe_texts(text: str, row: Row, test_case: str, platform: str, data: Path) -> dict[str, str]:
    """Return the recipe with the row alone: with its script, and with the program named."""
    head = text[: text.index("\nproducts:") + 1]
    for key, value in (
        ("gpus", "1"),
        ("nodes", "1"),
        ("n_repeat", "1"),
        ("platforms", platform),
        ("time_limit", str(TIME_LIMIT_S * (SLOWER if platform == "cpu" else 1))),
    ):
        head, count = re.subn(rf"^  {key}: .*$", f"  {key}: {value}", head, flags=re.MULTILINE)
        head = head if count else head.replace("\nspec:\n", f"\nspec:\n  {key}: {value}\n")
    if row.checkpoint:
        head = re.sub(
            r"(CHECKPOINT_LOAD_PATH=)[^\"]*", rf"\g<1>/mnt/artifacts/{row.checkpoint}", head
        )
    (program,) = re.findall(r'TRAINING_SCRIPT_PATH=([^"\s]+)', head)
    shared = re.sub(r"^  script(_setup)?: \|.*", "", head, flags=re.DOTALL | re.MULTILINE).rstrip()
    native = f"{shared}\n  training_script_path: {program}\n  data_path: {data}\n"
    if row.checkpoint or not row.is_training:  # frozen-start wants a checkpoint
        native += f"  checkpoint_load_path: {data / row.checkpoint}\n"
    inner = "    products:\n      - environment: [dev]\n        scope: [mr]\n"
    rows = f"products:\n  - test_case: [{test_case}]\n{inner}"
    return {"script": f"{head}{rows}", "native": f"{native}{rows}"}


def write_tokenizer(at: Path) -> None:
    """Write a tokenizer of bytes, as the library tokenizers reads it, of the model's size."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = (chr(256 + i) for i in range(256))
    words = [chr(i) if i in shown else next(hidden) for i in range(256)]
    words += [END, *(f"<word {i}>" for i in range(257, 1023))]
    bytes_as_text = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    model = {"type": "BPE", "vocab": {w: i for i, w in enumerate(words)}, "merges": []}
    added = {
        "id": 256,
        "content": END,
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [added],
        "pre_tokenizer": bytes_as_text,
        "decoder": bytes_as_text,
        "model": model,
    }
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "chat_template": template,
    }
    at.mkdir()
    (at / "tokenizer.json").write_text(json.dumps(tokenizer))
    (at / "tokenizer_config.json").write_text(json.dumps(config))


def main() -> None:
    """Make the tree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tree", type=Path, help="made here; must not be there yet")
    parser.add_argument("data", type=Path, help="where `run_rows.py` puts the checkpoint")
    parser.add_argument("--platform", default="dgx_h200", help="cpu where there is no GPU")
    args = parser.parse_args()
    data = args.data.resolve()
    args.tree.mkdir(parents=True)
    git = ("git", "-C", str(args.checkout))
    listed = subprocess.run(
        (*git, "ls-tree", "-r", "--name-only", "HEAD"), capture_output=True, text=True, check=True
    )
    there = listed.stdout.splitlines()
    taken = [t for t in TAKEN if any(p == t or p.startswith(f"{t}/") for p in there)]
    taken += [f"{CASES}/{row.case}/model_config.yaml" for row in ROWS.values()]
    taken += sorted({f"{RECIPES}/{row.recipe}" for row in ROWS.values()})
    archive = subprocess.run((*git, "archive", "HEAD", *taken), capture_output=True, check=True)
    subprocess.run(("tar", "x", "-C", args.tree), input=archive.stdout, check=True)
    shutil.copytree(Path(__file__).parent / "tree", args.tree, dirs_exist_ok=True)
    write_tokenizer(args.tree / "lab_tokenizer")
    for name, pattern, replacement in PATCHES:
        path = args.tree / name
        text, count = re.subn(pattern, replacement, path.read_text(), count=1, flags=re.DOTALL)
        assert count == 1, f"{name} is not what it was: {pattern} is not found"
        path.write_text(text)
    is_cpu = args.platform == "cpu"
    for name, row in ROWS.items():
        path = args.tree / CASES / row.case / "model_config.yaml"
        small = case_text(path.read_text(), row, SMALLER | (SMALLER_STILL if is_cpu else {}))
        recipe = (args.tree / RECIPES / row.recipe).read_text()
        for kind in ("script", "native"):
            test_case = f"lab_{name}_{kind}"
            folder = args.tree / CASES / row.case.partition("/")[0] / test_case
            folder.mkdir()
            (folder / "model_config.yaml").write_text(small)
            texts = recipe_texts(recipe, row, test_case, args.platform, data)
            (args.tree / RECIPES / f"{test_case}.yaml").write_text(texts[kind])
        shutil.rmtree(path.parent)
    for path in {args.tree / RECIPES / row.recipe for row in ROWS.values()}:
        path.unlink()
    who = ("-c", "user.name=lab", "-c", "user.email=lab@lab.invalid")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "tree")):
        subprocess.run(("git", "-C", args.tree, *words), check=True)
    print(f"{args.tree}: {len(ROWS)} rows, each with its script and natively: {' '.join(ROWS)}")


if __name__ == "__main__":
    main()
