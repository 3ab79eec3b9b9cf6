"""Scripts of the documentation, ported without reading it: what their pages warn of, as edits of the ports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Naive:
    """A port that ends normally, and has learned something else.

    Parameters
    ----------
    edits
        Pairs of text in the port, and what stands there instead.
    named
        Parts of what a check says about it.
    """

    edits: tuple[tuple[str, str], ...]
    named: tuple[str, ...]


NAIVE = {
    "contrastive": Naive(
        (("session.gather(model(first)), session.gather(model(second))", "model(first), model(second)"),),
        ("cross_entropy", "no mean over samples"),
    ),
    "custom-buffers": Naive(
        (
            ("self.mean.copy_(0.9 * self.mean + 0.1 * x.mean(0))", "self.mean = 0.9 * self.mean + 0.1 * x.mean(0)"),
            ("session.gather(x)", "x"),
        ),
        ("`model.0.mean`", "assigned anew"),
    ),
    "early-stopping": Naive(
        (
            (
                "state = session.state(best=math.inf, weights=weights_of(model), bad=0)",
                "best, weights, bad = math.inf, weights_of(model), 0",
            ),
            ("state.", ""),
        ),
        ("`best`", "when the loop is left"),
    ),
    "ema": Naive((("(model, optimizer, average)", "(model, optimizer)"),), ("`average[0.weight]`",)),
    "gan": Naive(
        (
            ("for x, row in data", "for number, (x, _) in enumerate(data)"),
            ("            number = session.position.samples // BATCH\n", ""),
            ("[row]", "[: len(x)]"),
        ),
        ("`number`", "the loss"),
    ),
    "gradient-penalty": Naive(
        (
            ("    for epoch in session", "    iteration = 0\n    for epoch in session"),
            ("            iteration = epoch * len(data) + session.position.samples // BATCH\n", ""),
            ("            if iteration % 3", "            iteration += 1\n            if iteration % 3"),
        ),
        ("`iteration`", "whether a step is made"),
    ),
    "iteration-loop": Naive(
        (("state = session.state(iteration=0, best=math.inf)", "iteration, best = 0, math.inf"), ("state.", "")),
        ("`iteration`", "the learning rate", "`best`"),
    ),
    "lbfgs": Naive(
        (
            (
                "                return mse_loss(model(inputs), targets)\n",
                (
                    "                optimizer.zero_grad()\n"
                    "                loss = mse_loss(model(inputs), targets)\n"
                    "                loss.backward()\n"
                    "                return loss\n"
                ),
            ),
            ("session.step(closure)", "optimizer.step(closure)"),
        ),
        ("session.step(closure)",),
    ),
    "own-checkpoints": Naive(
        (
            (
                "    state = session.state(best=0.0)\n",
                (
                    "    best, file = 0.0, session.directory / 'checkpoint.pt'\n"
                    "    if file.exists():\n"
                    "        best = torch.load(file)['best']\n"
                ),
            ),
            ("state.best", "best"),
            ("    return model", "        torch.save({'best': best}, file)\n    return model"),
        ),
        ("`best`",),
    ),
    "reinforcement-learning": Naive(
        (
            ("state = session.state(baseline=0.0)", "baseline = 0.0"),
            ("state.", ""),
            ("session.gather(rewards)", "rewards"),
        ),
        ("`baseline`", "the loss"),
    ),
    "replay-buffer": Naive(
        (
            ("state = session.state(update=0, target=", "update, target, memory = (0, "),
            ("copy.deepcopy(net), memory=", "copy.deepcopy(net), "),
            ("session.gather(new)", "new"),
            ("state.", ""),
            ("update, memory = update + 1, memory", "update += 1"),
        ),
        ("`update`", "`target[0.weight]`", "`memory`"),
    ),
    "truncated-bptt": Naive(
        (
            ("    state = session.state(hidden=torch.zeros(1, COLUMNS, HIDDEN))\n", ""),
            ("            if session.position.samples == 0:\n", ""),
            ("                state.hidden = torch.zeros(1, COLUMNS, HIDDEN)\n", ""),
            ("        for x, y, column in data:\n", "        hidden = None\n        for x, y, column in data:\n"),
            ("state.hidden[:, column]", "hidden"),
            ("session.gather(hidden[0].detach())[None]", "hidden.detach()"),
            ("state.hidden", "hidden"),
        ),
        ("`hidden`",),
    ),
}
