"""Sparse mixture of experts on the source of Python's standard library, from bytes.

python -m moe_jax.language.main --config=configs/language/stdlib_moe.py --workdir=runs/stdlib_moe
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the configuration."""
    return ConfigDict(
        {
            "seed": 0,
            "data": {
                "source": "",
                "text_key": "text",
                "held_out_fraction": 0.05,
                "tokenizer": "",
                "cache_dir": "",
                "batch_size": 16,
                "sequence_length": 256,
                "accumulate": 1,
                "eval_tokens": 65_536,
            },
            "model": {
                "model_dim": 128,
                "num_layers": 4,
                "num_heads": 2,
                "num_kv_heads": 1,
                "layer_pattern": ("sparse",),
                "hidden_dim": 256,
                "num_experts": 16,
                "num_selected": 2,
                "expert_hidden_dim": 128,
                "num_shared_experts": 0,
                "router": "top_k",
                "router_options": {},
                "capacity_factor": None,
                "capacity_priority": "position",
                "expert_dropout": 0.0,
                "gated": True,
                "activation": "silu",
                "qk_norm": True,
                "rope_base": 10_000.0,
                "tie_embeddings": False,
                "remat": "none",
                "scan_layers": False,
                "dtype": "bfloat16",
            },
            "optimizer": {
                "learning_rate": 6e-3,
                "schedule": "cosine",
                "warmup_steps": 60,
                "decay_fraction": 0.2,
                "final_fraction": 0.0,
                "weight_decay": 0.1,
                "beta1": 0.9,
                "beta2": 0.95,
                "epsilon": 1e-8,
                "max_gradient_norm": 1.0,
            },
            "loss": {
                "load_balance_weight": 0.01,
                "router_z_weight": 0.001,
                "importance_weight": 0.0,
                "load_balance_scope": "batch",
                "balance_bias_rate": 0.001,
            },
            "train": {
                "num_steps": 1400,
                "log_every": 10,
                "eval_every": 140,
                "checkpoint_every": 140,
                "keep": 3,
                "max_skipped_in_row": 10,
            },
            "sample": {"prompt": "def ", "num_tokens": 400, "temperature": 0.7},
            "mesh": {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, "exchange": "auto"},
        }
    )
