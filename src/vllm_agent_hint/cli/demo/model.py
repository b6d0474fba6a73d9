"""Small models with random weights and a local tokenizer, one per kind of KV cache.

What a model says is of no interest here; what its KV cache costs to fill is. Random weights need
no download, and keep the attention, the cache groups and the greedy decoding of the real thing.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

MAX_POSITIONS: Final = 131_072
VOCABULARY: Final = 512
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER_TEXT: Final = (
    "the system prompt of an agent, the user who asks, the tool that answers, the assistant",
    "a session keeps its context while a tool runs; what it has read it should not read again",
)


@dataclass(frozen=True, slots=True)
class ModelKind:
    """The shape of a model.

    Args:
        config_class: Name of its configuration class in ``transformers``.
        weight_std: Standard deviation of the weights; large enough that greedy tokens vary.
        more: Further fields of the configuration.
    """

    config_class: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    weight_std: float = 0.08
    tied_embeddings: bool = True
    more: Mapping[str, object] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(Path(__file__).read_bytes() + repr(self).encode()).hexdigest()[:8]


KINDS: Final[Mapping[str, ModelKind]] = {
    # Full attention. 1 KiB of KV cache per token: prefill dominates, as in a real agent's turn.
    "qwen3": ModelKind("Qwen3Config", 256, 4, heads=8, kv_heads=2, head_dim=32),
    # The same, for tests in which time matters more than what a prefill costs.
    "qwen3-small": ModelKind("Qwen3Config", 64, 2, heads=2, kv_heads=1, head_dim=32),
    # The same for a GPU, where the others are too small to be measured.
    "qwen3-gpu": ModelKind(
        "Qwen3Config", 2048, 24, heads=16, kv_heads=8, head_dim=128, weight_std=0.03
    ),
    # Hybrid: linear attention (state blocks) beside full attention. The heads are chosen so that
    # vLLM's common block of both is 128 tokens; fewer KV heads make it 640 or more.
    "qwen3next": ModelKind(
        "Qwen3NextConfig",
        64,
        4,
        heads=4,
        kv_heads=4,
        head_dim=128,
        weight_std=0.3,
        tied_embeddings=False,
        more={
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "partial_rotary_factor": 0.5,
            "full_attention_interval": 2,
        },
    ),
    # Sliding window of 256 tokens beside full attention.
    "gemma3": ModelKind(
        "Gemma3TextConfig",
        64,
        4,
        heads=2,
        kv_heads=1,
        head_dim=32,
        more={
            "sliding_window": 256,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}


def ensure_model(kind: str, folder: Path) -> Path:
    """The folder of the model of this kind below ``folder``, made at the first call.

    Made in a process of its own, so that the caller never imports torch, and moved into place
    when complete, so that several callers may ask at the same time.

    Raises:
        subprocess.CalledProcessError: The model could not be made; its output holds the reason.
    """
    target = folder / f"{kind}-{KINDS[kind].fingerprint}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=folder))
    command = [sys.executable, "-m", __name__, kind, str(unfinished)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        shutil.rmtree(unfinished)
        sys.stderr.write(made.stderr)
        made.check_returncode()
    try:
        os.rename(unfinished, target)
    except OSError:  # Someone else was faster, with the same bytes.
        shutil.rmtree(unfinished)
    return target


def write_model(kind: ModelKind, folder: Path) -> None:
    """Writes weights, configuration and tokenizer; the same bytes on every call."""
    import torch
    import transformers

    tokenizer = _make_tokenizer()
    tokenizer.save_pretrained(folder)
    config = getattr(transformers, kind.config_class)(
        vocab_size=len(tokenizer),
        hidden_size=kind.hidden_size,
        intermediate_size=2 * kind.hidden_size,
        num_hidden_layers=kind.layers,
        num_attention_heads=kind.heads,
        num_key_value_heads=kind.kv_heads,
        head_dim=kind.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=kind.tied_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **kind.more,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, kind.weight_std)
    model.save_pretrained(folder)


def _make_tokenizer() -> Any:
    """Bytes with a few merges: any text has tokens, and every token has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a small model with random weights.")
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_model(KINDS[arguments.kind], arguments.folder)
