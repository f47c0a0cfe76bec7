"""The sizes of a model that decide what a layer costs, and the sizes of known models.

Parameters are counted as Megatron lays them out: RMSNorm, matrices without biases (but for those of
Qwen's queries, keys and values), a vocabulary padded so that every common TP degree divides it.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY_MULTIPLE = 384
"""What the entry point pads the vocabulary to: 1, 2, 3, 4, 6 and 8 divide it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder of equal layers."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    attention_heads: int
    query_groups: int
    """Heads of keys and values; ``attention_heads`` without grouped queries."""
    vocab_size: int
    """Padded."""
    seq_length: int
    micro_batch_size: int = 1
    gated: bool = True
    """Whether the MLP has a gate (SwiGLU): three matrices instead of two."""
    tied: bool = False
    """Whether the output layer uses the embedding's matrix."""
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        sizes = (
            *(self.num_layers, self.hidden_size, self.ffn_hidden_size, self.attention_heads),
            *(self.query_groups, self.vocab_size, self.seq_length, self.micro_batch_size),
        )
        if min(sizes) < 1:
            raise ValueError(f"model {self.name}: every size must be positive, found {sizes}")
        for size, what in ((self.hidden_size, "hidden size"), (self.query_groups, "query groups")):
            larger, smaller = max(size, self.attention_heads), min(size, self.attention_heads)
            if larger % smaller:
                raise ValueError(
                    f"model {self.name}: {what} {size} and {self.attention_heads} attention heads "
                    "do not divide"
                )

    @property
    def qkv_size(self) -> int:
        """Rows of the matrix that gives queries, keys and values."""
        return self.hidden_size + 2 * self.query_groups * (self.hidden_size // self.attention_heads)

    @property
    def fc1_size(self) -> int:
        """Rows of the first matrix of the MLP: gate and up, or up alone."""
        return self.ffn_hidden_size * (2 if self.gated else 1)

    @property
    def layer_matrix_parameters(self) -> int:
        """Elements of a layer's matrices, all of which TP divides."""
        wide = self.qkv_size + self.hidden_size + self.fc1_size + self.ffn_hidden_size
        return self.hidden_size * wide

    @property
    def layer_parameters(self) -> int:
        """Elements of one layer: matrices, biases, two norms."""
        bias = self.qkv_size if self.qkv_bias else 0
        return self.layer_matrix_parameters + bias + 2 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Elements of one vocabulary matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        matrices = 1 if self.tied else 2
        layers = self.num_layers * self.layer_parameters
        return layers + matrices * self.embedding_parameters + self.hidden_size

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.seq_length * self.micro_batch_size

    @property
    def squared(self) -> int:
        """Sum of the squared lengths of a micro-batch of one document a sequence."""
        return self.micro_batch_size * self.seq_length**2

    def rank_parameters(self, *, depth: int, tp: int, first: bool, last: bool) -> int:
        """Elements that each rank of a stage holds; norms are whole on every rank."""
        bias = self.qkv_size if self.qkv_bias else 0
        layer = (self.layer_matrix_parameters + bias) // tp + 2 * self.hidden_size
        # A stage that is both holds a tied matrix once.
        matrices = max(first, last) if self.tied else first + last
        ends = matrices * (self.embedding_parameters // tp) + (self.hidden_size if last else 0)
        return depth * layer + ends

    def problem_with_tp(self, tp: int, *, sequence_parallel: bool = False) -> str | None:
        """Why the model cannot be divided by a TP degree; None when it can.

        Args:
            sequence_parallel: Whether TP groups divide sequences as well.
        """
        if tp < 1:
            return f"TP degree {tp} is not positive"
        for size, what in (
            (self.attention_heads, "attention heads"),
            (self.query_groups, "query groups"),
            (self.ffn_hidden_size, "FFN channels"),
            (self.vocab_size, "words of the vocabulary"),
            *([(self.seq_length, "tokens of a sequence")] if sequence_parallel else []),
        ):
            if size % tp:
                return f"{size} {what} do not divide by {tp}"
        return None

    def valid_tps(self, limit: int, *, sequence_parallel: bool = False) -> tuple[int, ...]:
        """TP degrees up to ``limit`` by which the model can be divided, ascending."""
        return tuple(
            tp
            for tp in range(1, limit + 1)
            if self.problem_with_tp(tp, sequence_parallel=sequence_parallel) is None
        )


def padded_vocabulary(words: int) -> int:
    """The least multiple of 384 that holds ``words``."""
    return -(-words // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _llama(name: str, layers: int, hidden: int, ffn: int, heads: int, groups: int) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        attention_heads=heads,
        query_groups=groups,
        vocab_size=padded_vocabulary(32_000),
        seq_length=8192,
    )


def _qwen(name: str, layers: int, hidden: int, ffn: int, heads: int, groups: int) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        attention_heads=heads,
        query_groups=groups,
        vocab_size=padded_vocabulary(152_064),
        seq_length=8192,
        qkv_bias=True,
    )


# Sizes: config.json of each model on the Hugging Face hub. LLaMA 2 was not published with about 30
# billion parameters: 30b has the sizes of LLaMA 1 (Touvron et al. 2023, table 2).
MODELS = {
    shape.name: shape
    for shape in (
        _llama("llama2-7b", 32, 4096, 11008, 32, 32),
        _llama("llama2-13b", 40, 5120, 13824, 40, 40),
        _llama("llama2-30b", 60, 6656, 17920, 52, 52),
        _llama("llama2-70b", 80, 8192, 28672, 64, 8),
        _qwen("qwen2.5-7b", 28, 3584, 18944, 28, 4),
        _qwen("qwen2.5-14b", 48, 5120, 13824, 40, 8),
        _qwen("qwen2.5-32b", 64, 5120, 27648, 40, 8),
        _qwen("qwen2.5-72b", 80, 8192, 29568, 64, 8),
        # The preset ``tiny``.
        ModelShape(
            name="tiny",
            num_layers=4,
            hidden_size=128,
            ffn_hidden_size=256,
            attention_heads=8,
            query_groups=4,
            vocab_size=padded_vocabulary(258),
            seq_length=1024,
        ),
    )
}
"""Known models by name; sequences of 8K tokens, one a micro-batch (``dataclasses.replace`` changes
that)."""
