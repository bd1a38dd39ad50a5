"""The Triton kernels on a CPU, through Triton's interpreter, against float64; one JSON document on standard output.

A process of its own, with TRITON_INTERPRET=1 before Triton is imported. In float32: the interpreter's bfloat16 products
are not those of a GPU.
"""

from __future__ import annotations

import json

import torch
from exact import attention_of_one, experts_one_by_one, relative_error

from prefill_probe.reference.attention import attend_one
from prefill_probe.reference.moe import experts_product, route, tiles_for
from prefill_probe.reference.pools import PAGE_TOKENS


def moe(tokens: int, hidden: int, inner: int, experts: int, choices: int) -> dict[str, float]:
    chance = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=chance)
    gate_up = torch.randn(experts, 2 * inner, hidden, generator=chance) * hidden**-0.5
    down = torch.randn(experts, hidden, inner, generator=chance) * inner**-0.5
    weights, ids = route(torch.randn(tokens, experts, generator=chance), choices)
    found = experts_product(x, gate_up, down, weights, ids)
    exact = experts_one_by_one(x, gate_up, down, weights, ids)
    return {"rows": tiles_for(tokens * choices, experts).rows, "error": relative_error(found, exact)}


def decode() -> dict[str, float]:
    chance = torch.Generator().manual_seed(1)
    sequences, heads, kv_heads, size, pages = 3, 6, 2, 32, 8
    q = torch.randn(sequences, heads, size, generator=chance)
    keys, values = torch.randn(2, pages * PAGE_TOKENS, kv_heads, size, generator=chance)
    table = torch.tensor([[5, 1, 0], [2, 0, 0], [7, 3, 4]], dtype=torch.int32)
    lengths = torch.tensor([PAGE_TOKENS + 7, 1, 3 * PAGE_TOKENS])
    found = attend_one(q, keys, values, table, lengths)
    exact = attention_of_one(q, keys, values, table, lengths, PAGE_TOKENS)
    return {"error": relative_error(found, exact)}


def main() -> None:
    cases = {
        "few tokens an expert": moe(5, 96, 40, 8, 2),
        "depth and width off the tiles": moe(40, 100, 70, 2, 1),
        "many tokens an expert": moe(70, 128, 64, 2, 2),
        "one expert gets all": moe(33, 64, 64, 1, 1),
        "decode": decode(),
    }
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
