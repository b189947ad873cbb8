"""The keys of a training run's TOML file: sections, defaults, and what each key means.

The file is read by `settings`; --print-config prints it with these meanings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from course_lib.single_gpu.config import PRESETS

RECIPES = ("none", "transformer-engine", "fp8-lm", "deepseek-v3", "nanotron")  # of notebook 14, with FP8 matmuls


def key(default: Any, meaning: str, **limits: Any) -> Any:
    """Return a field of a section. limits: choices; least and most, the smallest and the largest value; above and
    below, exclusive limits.
    """
    metadata = {"meaning": meaning, **limits}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Run:
    """The length of the run, and its batches."""

    steps: int = key(50, "optimizer steps", least=1)
    batch: int = key(16, "sequences per step, over all ranks", least=1)
    seq: int = key(128, "tokens per sequence", least=1)
    seed: int = key(0, "seed of the initial weights and of the order of the data")
    start_batch: int | None = key(None, "sequences in the first step, if the batch grows; default: batch", least=1)
    ramp: int = key(0, "steps in which the batch grows from start_batch to batch", least=0)
    drop_tokens: float = key(0.0, "share of the input tokens to replace at random", least=0, below=1)


@dataclass
class Model:
    """The model: a preset, perhaps with other sizes; the sizes in a config.json; or a model with its weights."""

    preset: str | None = key(None, "sizes by name; small if hf_config and from_hf are not set", choices=list(PRESETS))
    hf_config: str | None = key(None, "a config.json of transformers, or its folder: its sizes, with random weights")
    from_hf: str | None = key(None, "a folder with config.json and safetensors: its sizes and weights")
    layers: int | None = key(None, "number of layers, instead of the preset's", least=1)
    hidden: int | None = key(None, "width of the hidden states, instead of the preset's", least=1)
    heads: int | None = key(None, "query heads, instead of the preset's", least=1)
    kv_heads: int | None = key(None, "key and value heads, instead of the preset's", least=1)
    ffn_hidden: int | None = key(None, "width of the MLP, instead of the preset's", least=1)
    experts: int | None = key(None, "experts per layer; without it, a dense model", least=1)
    top_k: int | None = key(None, "experts per token; default: 2", least=1)
    expert_hidden: int | None = key(None, "width of an expert; default: the width of the MLP", least=1)
    shared: int | None = key(None, "experts that process every token; default: none", least=0)
    aux_loss_coeff: float = key(0.01, "weight of the balance loss of the experts", least=0)


@dataclass
class Tokenizer:
    """The tokenizer."""

    tokenizer: str | None = key(
        None, "a tokenizer.json, a folder with one, or a name at Hugging Face; default: one token per byte"
    )


@dataclass
class Data:
    """The text to train on, from one source or several. For several, write a table [[data.sources]] for each, with the
    keys dataset, weight, column, split, subset, documents, token_dtype and end_token.
    """

    dataset: str | None = key(
        None,
        "a file (.txt, .jsonl, .json, .csv, .tsv, .parquet; tokens: .bin, .npy), a folder of such files or of "
        "save_to_disk, or a name at Hugging Face; default: the source of Python's standard library",
    )
    column: str = key("text", "the column that holds the text")
    split: str = key("train", "the split of the data set")
    subset: str | None = key(None, "one of the configurations of a data set")
    documents: int | None = key(None, "how many documents to read at most; default: all", least=1)
    token_dtype: str = key("uint16", "dtype of a .bin file of tokens", choices=["uint16", "int32", "uint32"])
    end_token: int | None = key(
        None, "the token that ends each document of a file of tokens; default: the tokenizer's", least=0
    )
    sources: list[dict] = key([], "tables [[data.sources]], instead of the keys above")
    document_masks: bool = key(True, "attention stays within a document, and positions restart at each")
    cache: str | None = key(None, "folder for the tokens; default: ~/.cache/llm_training_at_scale")


@dataclass
class LayoutSettings:
    """How the model and the batch are split over the ranks."""

    layout: str | None = key(
        None,
        "such as dp2,pp2,tp4,sp,zero1,mb2, or auto: the planner's choice; default: data parallelism with ZeRO-1 over "
        "all ranks",
    )
    elastic: bool = key(False, "fit dp to the number of ranks, whatever the dp in layout")
    cluster: str | None = key(None, "for auto: a cluster that the planner knows, or its TOML file; default: by the GPU")


@dataclass
class Optimizer:
    """The optimizer and its schedule. Norms and biases have no weight decay."""

    optimizer: str = key("adamw", "adamw, or sgd", choices=["adamw", "sgd"])
    lr: float = key(2e-3, "the largest learning rate", above=0)
    betas: list[float] = key([0.9, 0.95], "AdamW's two decay rates of the moments")
    eps: float = key(1e-8, "AdamW's epsilon", above=0)
    momentum: float = key(0.0, "SGD's momentum", least=0, below=1)
    weight_decay: float = key(0.1, "weight decay of matrices", least=0)
    no_decay: list[str] = key([], "parts of the names of more parameters without weight decay, such as embedding")
    schedule: str = key(
        "cosine",
        "after warmup: a cosine or a line down to min_lr, a constant, or wsd: constant, and a line down in the last "
        "decay steps",
        choices=["cosine", "linear", "constant", "wsd"],
    )
    warmup: int = key(0, "steps in which the learning rate rises to lr", least=0)
    decay: int | None = key(None, "steps of the decay of wsd; default: a tenth of steps", least=1)
    min_lr: float = key(0.1, "the last learning rate, as a share of lr", least=0, most=1)
    max_norm: float = key(1.0, "gradients are clipped to this norm", above=0)
    bad_steps: int = key(3, "steps in a row without a finite loss and norm that stop the run", least=1)


@dataclass
class Precision:
    """The number formats. Weights that are updated, and the optimizer's states, are float32."""

    dtype: str | None = key(None, "dtype of the matmuls; default: bf16 on a GPU, else fp32", choices=["fp32", "bf16"])
    fp8: str = key("none", "recipe of the 8-bit matmuls in the blocks", choices=list(RECIPES))
    fp8_gather: bool = key(False, "gather the weights of 8-bit layers in 8 bits, with zero3")


@dataclass
class Kernels:
    """Kernels of notebook 12b. Without a GPU they are interpreted, and slow."""

    kernels: bool = key(False, "fused norms, residual sums, rotary positions and SwiGLU")
    chunked_loss: bool = key(True, "compute the loss without storing logits")


@dataclass
class Attention:
    """The attention."""

    attention: str = key(
        "sdpa", "PyTorch's scaled_dot_product_attention, or the course's FlashAttention", choices=["sdpa", "flash"]
    )


@dataclass
class Compile:
    """torch.compile, for each block of the model."""

    compile: bool = key(False, "compile each block")
    backend: str = key("inductor", "the compiler of torch.compile")


@dataclass
class Recomputation:
    """Activation recomputation."""

    recompute: str | None = key(
        None, "none, selective or full; default: as layout says", choices=["none", "selective", "full"]
    )


@dataclass
class CheckpointSettings:
    """Checkpoints, and the export of the trained model."""

    checkpoints: str | None = key(None, "a folder: continue from its last checkpoint, and save there")
    save_every: int = key(100, "steps between checkpoints; the last step is saved as well", least=1)
    keep: int = key(2, "number of checkpoints to keep", least=1)
    export: str | None = key(None, "a folder for the trained model in the format of transformers; needs checkpoints")


@dataclass
class Evaluation:
    """The loss on text that is not trained on."""

    eval_every: int = key(0, "steps between evaluations; the last step is evaluated as well; 0: none", least=0)
    eval_dataset: str | None = key(None, "held-out text, like dataset; default: the end of each source")
    eval_split: str | None = key(None, "the split of eval_dataset; default: split")
    eval_share: float = key(0.01, "share of each source that is held out without eval_dataset", above=0, below=1)
    eval_sequences: int = key(64, "sequences to evaluate at most", least=1)


@dataclass
class Logging:
    """The lines that are printed, and the files that are written."""

    log_every: int = key(10, "steps between lines; the host waits for the device only then", least=1)
    out: str | None = key(None, "a file of JSON lines, one for each step; a run that continues adds to it")
    summary: str | None = key(None, "a folder for a page of plots of the run: summary.html and summary.png")
    tensorboard: str | None = key(None, "a folder for TensorBoard")
    wandb: str | None = key(None, "a project of Weights & Biases")
    peak_tflops: float | None = key(
        None, "peak of a device in TFLOP/s, for MFU, if the course does not know the device", above=0
    )


@dataclass
class Settings:
    """All settings of a run, by section."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    data: Data = field(default_factory=Data)
    layout: LayoutSettings = field(default_factory=LayoutSettings)
    optimizer: Optimizer = field(default_factory=Optimizer)
    precision: Precision = field(default_factory=Precision)
    kernels: Kernels = field(default_factory=Kernels)
    attention: Attention = field(default_factory=Attention)
    compile: Compile = field(default_factory=Compile)
    recomputation: Recomputation = field(default_factory=Recomputation)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluation: Evaluation = field(default_factory=Evaluation)
    logging: Logging = field(default_factory=Logging)
