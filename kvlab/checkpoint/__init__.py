"""Real checkpoints: a local Hugging Face folder (Llama, Qwen2, Qwen3, Mistral) becomes a ``model.Decoder``, and back.

Nothing is downloaded and no pickle is opened. All that can be checked without the weights (the configuration, the
name and shape of every tensor) is checked before memory is taken for them. A field or a tensor that is not understood
is an error: a decoder that leaves something out would still give plausible text.

``_config`` turns config.json into a ``ModelConfig`` and back, ``_files`` reads and writes the folder.
"""

from __future__ import annotations

from kvlab.checkpoint._config import ARCHITECTURES, config_from_hf
from kvlab.checkpoint._files import load, load_tokenizer, save

__all__ = [
    "ARCHITECTURES",
    "config_from_hf",
    "load",
    "load_tokenizer",
    "save",
]
