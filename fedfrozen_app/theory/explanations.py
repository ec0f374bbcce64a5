"""The text of the theory page: a title, a picture and a paragraph each. Names in braces are filled in."""

INTRODUCTION = """
A tiny federation that can be solved on paper: clients hold sequences, the model is attention Z(H; Φ) W,
linear unless stated otherwise, with kernel Φ = (W_Q, W_K) and value block W, the loss is squared, and a
ridge keeps both small. F is what FedAvg minimises. P(Φ) is the best F that a kernel allows: with Φ fixed,
the best W is the solution of a linear system. The heterogeneity dial makes the clients' true kernels and
inputs differ; at 0 they are all alike. Lines are means of {seeds} seeds, bands their 95 % confidence.
"""

SECTIONS = (
    (
        "1. Warm-up goes down the profile, up to a point",
        "profile.png",
        """
P is never computed during training, yet FedAvg goes down it: warm-up learns a kernel that serves all clients.
With clients that are alike it goes down to the end. With clients that differ, each pulls the kernel its
own way in its local steps (kernel drift), and the average settles where the pulls cancel, which is not
where P is lowest: after its minimum the profile rises again.
""",
    ),
    (
        "2. Local steps decide whether freezing pays",
        "local_steps.png",
        """
Each point of the left picture is a run that froze the kernel after that many rounds. With few local steps
the longest warm-up is best here; but the rounds are equal, so that these runs have taken fewer steps in all
and still learn. With many, the curve has a minimum inside: too early wastes what warm-up would still
learn, too late lets drift spoil it. Equal steps in all are a study of their own (study=controls).
""",
    ),
    (
        "3. What happens after the freeze, and what auto watches",
        "selection.png",
        """
Left: under a fixed kernel the rest is a convex problem, and F falls to what that kernel allows and stays
there. Freezing the value block instead of the kernel after round {switch} ends at {value:.3f}, freezing
the kernel at {kernel:.3f}, never freezing at {never:.3f}. Right: strategy.warmup_rounds=auto compares the
kernel's agreement from round to round with the drift between clients. Movement repeats itself in the next
round, chance does not. When agreement has faded to half a percent of the drift, and the training loss has
levelled off, the kernel is frozen. Where clients are alike the ratio stays above the line as long as there
is something to learn.
""",
    ),
    (
        "4. More clients, or fewer of them at a time",
        "federation.png",
        """
The trade-off is there from four clients on; with two it is weak. If only some of them take part in a round,
never freezing gets worse, because each round follows other clients.
""",
    ),
    (
        "5. The more clients differ, the earlier to freeze",
        "heterogeneity.png",
        """
Every line is a heterogeneity; its dot is the best warm-up and its star what auto takes on average.
{digits}
""",
    ),
    (
        "6. Does it survive outside linear attention?",
        "fidelity.png",
        """
The same sweep with other feature maps, and with softmax attention as teacher and student. {layers}
""",
    ),
)
CIFAR10 = ("7. CIFAR-10", "cifar10.png", "A ViT of width 192 from scratch, ten clients, AdamW.")

DIGITS = "Right: real Transformers on digits, with softmax attention; stars and dashed lines are auto."
LAYERS = "Right: softmax attention in Transformers of one and several layers, trained on digits."
MISSING = "The part with real Transformers is missing: run benchmarks/warmup.py {study} first."

SHARES = """
Final F by warm-up, as a share of the rounds. Cosine: the rate decays to a hundredth, in both stages. "Last":
frozen in the last round alone. A decaying rate that never freezes is the control for freezing: it calms
the kernel as well. `fedfrozen theory study=controls` asks the same of smaller problems with 100 seeds.
"""

REGRET = """
The best fixed warm-up is chosen on seeds 0 to 4 and evaluated, as auto is, on the others. Regret is how
much higher auto's final F is, as a share of the range between the best and the worst warm-up.
"""

ACCURACY = """
The same for auto on these: the best fixed warm-up is chosen on seeds 0 to 4, and the points of accuracy
that auto lacks are counted on the others.
"""

CONTROLS = """
What else could make freezing look good? Problems of four clients with eight sequences each, {seeds} seeds;
bands and intervals are 95 % confidence, differences are paired over the seeds, and the best warm-up is
chosen on the first half of the seeds and evaluated on the other. "Last": frozen in the last round alone.
"""

CONTROL_SECTIONS = {
    "budget": (
        "Equal budgets",
        """
Local steps times rounds is the same for every line. With the rounds equal instead, few local steps are also
few steps in all, and a run that has not learned yet has nothing to gain from a freeze.
""",
    ),
    "rate": (
        "A rate that decays",
        """
Cosine: the rate falls to a hundredth, in both stages. It calms the kernel without freezing it, so that
never freezing under such a rate is what freezing has to be compared with.
""",
    ),
    "softmax": (
        "Softmax attention",
        """
Teacher and student attend by softmax, in as many rounds as never freezing needs to level off at this rate:
the table's last column is what it still falls by in the last fifth of them (below 0: it rises).
""",
    ),
    "dials": (
        "Which difference between clients makes freezing pay",
        """
Clients differ in their true kernels, their true values or their inputs' means, one by one.
""",
    ),
}
