"""What built-in methods declare: their first line, paper, settings and defaults.

Written by `python -m fedfrozen_app.config.built_in`: change the classes, and run it again.
"""

# ruff: noqa: E501
from typing import Any

DECLARED: dict[str, dict[str, dict[str, Any]]] = {
    "strategies": {
        "apfl": {
            "says": "FedAvg plus one personal model per client, mixed with the global one by a learned weight.",
            "paper": "Deng et al. 2020, arXiv 2003.13461",
            "settings": {
                "alpha": 0.5,
                "learn_alpha": True,
            },
        },
        "ditto": {
            "says": "FedAvg plus one personal model per client, pulled towards the global one.",
            "paper": "Li et al. 2021, arXiv 2012.04221",
            "settings": {
                "lam": 0.1,
            },
        },
        "fedavg": {
            "says": "Train, send and average every parameter in every round.",
            "paper": "McMahan et al. 2017, arXiv 1602.05629",
            "settings": {},
        },
        "fedbabu": {
            "says": "Train and average the body alone under a fixed head, which clients fine-tune at the end.",
            "paper": "Oh et al. 2022, arXiv 2106.06042",
            "settings": {
                "fixed": ["head"],
                "fine_tune": ["head"],
                "fine_tune_epochs": 5,
            },
        },
        "feddyn": {
            "says": "Align the clients' optima with the federation's by a linear and a proximal term.",
            "paper": "Acar et al. 2021, arXiv 2111.04263",
            "settings": {
                "alpha": 0.1,
            },
        },
        "fedfrozen": {
            "says": "Train everything during a warm-up, then hold the attention kernel fixed.",
            "paper": "Du et al. 2026, arXiv 2605.06446",
            "settings": {
                "warmup_rounds": None,
                "warmup_minimum": None,
                "warmup_cap": None,
                "warmup_threshold": 0.005,
                "warmup_window": 5,
                "warmup_patience": 3,
                "warmup_progress": 0.05,
                "warmup_span": None,
                "freeze_scope": "qk",
            },
        },
        "fednova": {
            "says": "Divide updates by the number of local steps before averaging them.",
            "paper": "Wang et al. 2020, arXiv 2007.07481",
            "settings": {},
        },
        "fedotp": {
            "says": "Match a global and a local text context with an image's patches by optimal transport.",
            "paper": "Li et al. 2024, arXiv 2403.00041",
            "settings": {
                "text_tokens": 16,
                "template": "a photo of a {}.",
                "mass": 0.8,
                "epsilon": 0.1,
                "iterations": 20,
            },
        },
        "fedpart": {
            "says": "Full rounds first; then train and send one layer group at a time, shallow to deep.",
            "paper": "Wang et al. 2024, NeurIPS",
            "settings": {
                "full_rounds": 5,
                "group_rounds": 2,
                "between_rounds": 5,
                "groups": None,
            },
        },
        "fedper": {
            "says": "Train everything together, keep a personal part (the head) on the client, and average the rest.",
            "paper": "Arivazhagan et al. 2019, arXiv 1912.00818",
            "settings": {
                "private": ["head"],
            },
        },
        "fedpgp": {
            "says": "A global text context that stays near zero-shot, plus one low-rank personal term per client.",
            "paper": "Cui et al. 2024, arXiv 2405.09771",
            "settings": {
                "text_tokens": 16,
                "template": "a photo of a {}.",
                "rank": 8,
                "mu": 1.0,
                "temperature": 0.5,
            },
        },
        "fedprox": {
            "says": "FedAvg with a proximal term that pulls every client towards the round's global model.",
            "paper": "Li et al. 2020, arXiv 1812.06127",
            "settings": {
                "mu": 0.01,
            },
        },
        "fedrep": {
            "says": "Train the client's own head first, then the body; only the body is sent and averaged.",
            "paper": "Collins et al. 2021, arXiv 2102.07078",
            "settings": {
                "private": ["head"],
                "head_epochs": 2,
            },
        },
        "local": {
            "says": "The baseline without a federation: every client trains alone and shares nothing.",
            "paper": "",
            "settings": {},
        },
        "local_momentum": {
            "says": "FedAvg whose clients keep their momentum between rounds.",
            "paper": "Yu et al. 2019, arXiv 1905.03817",
            "settings": {
                "beta": 0.9,
            },
        },
        "mimelite": {
            "says": "FedAvg whose clients step with the server's momentum.",
            "paper": "Karimireddy et al. 2020, arXiv 2008.03606",
            "settings": {
                "beta": 0.9,
            },
        },
        "moon": {
            "says": "FedAvg with representations pulled towards the global model's, away from the client's previous ones.",
            "paper": "Li et al. 2021, arXiv 2103.16257",
            "settings": {
                "mu": 1.0,
                "temperature": 0.5,
            },
        },
        "pfeddc": {
            "says": "Train prompts: global ones are averaged, local ones and their fusion are kept. Encoders are frozen.",
            "paper": "Zhang et al. 2025, arXiv 2506.21144",
            "settings": {
                "prompts": "both",
                "modalities": "both",
                "fusion": "cross",
                "fusion_query": "global",
                "text_tokens": 16,
                "vision_tokens": 16,
                "depth": 1,
                "heads": 8,
                "template": "a photo of a {}.",
                "mu": 0.0,
            },
        },
        "pfedmoap": {
            "says": "One text context per client, mixed with the nearest ones of other clients by a private gate.",
            "paper": "Luo et al. 2024, arXiv 2410.10114",
            "settings": {
                "text_tokens": 16,
                "template": "a photo of a {}.",
                "experts": 3,
                "share": 0.5,
                "gate_heads": 8,
                "gate_width": 128,
            },
        },
        "private_attention": {
            "says": "Keep queries, keys and values on the client; average everything else.",
            "paper": "after Li et al. 2022, arXiv 2211.01572",
            "settings": {
                "private": ["query", "key", "value"],
            },
        },
        "qfedavg": {
            "says": "Give clients with a high loss more weight, so that the model serves all clients equally well.",
            "paper": "Li et al. 2020, arXiv 1905.10497",
            "settings": {
                "q": 1.0,
                "lipschitz": None,
            },
        },
        "safl": {
            "says": "Every client trains and sends the layers with its own highest attention scores.",
            "paper": "Li and Zhang 2025, arXiv 2504.11793",
            "settings": {
                "select": "attention",
                "top_k": None,
                "layers": None,
                "zero_fill": False,
                "tokens": None,
                "profile_examples": 256,
                "keep": 1.0,
            },
        },
        "scaffold": {
            "says": "FedAvg whose clients correct every step by the global and their own control variate.",
            "paper": "Karimireddy et al. 2020, arXiv 1910.06378",
            "settings": {},
        },
        "schedule": {
            "says": "Train the roles and layers that a list of stages defines, by round.",
            "paper": "",
            "settings": {
                "stages": None,
                "cycle": None,
            },
        },
        "term": {
            "says": "Weight clients by the exponential of their loss.",
            "paper": "Li et al. 2021, arXiv 2007.01162",
            "settings": {
                "t": 1.0,
            },
        },
    },
    "server_optimizers": {
        "none": {
            "says": "w + Δ̄, in the update's own memory: the mean of what the clients sent.",
            "paper": "",
            "settings": {},
        },
        "avgm": {
            "says": "",
            "paper": "",
            "settings": {
                "lr": 1.0,
                "beta": 0.9,
            },
        },
        "adam": {
            "says": "",
            "paper": "",
            "settings": {
                "lr": 0.01,
                "beta1": 0.9,
                "tau": 0.001,
                "v_start": 0.0,
                "beta2": 0.99,
                "correction": "none",
            },
        },
        "yogi": {
            "says": "",
            "paper": "",
            "settings": {
                "lr": 0.01,
                "beta1": 0.9,
                "tau": 0.001,
                "v_start": 0.0,
                "beta2": 0.99,
                "correction": "none",
            },
        },
        "adagrad": {
            "says": "",
            "paper": "",
            "settings": {
                "lr": 0.01,
                "beta1": 0.0,
                "tau": 0.001,
                "v_start": 0.0,
            },
        },
    },
}
