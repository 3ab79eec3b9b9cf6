"""Layers and operators, each in a small model: what the table of fused operators lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint
from torch import nn

from tests.extensions.fusion.models import (
    SAMPLES,
    Attention,
    Autocast,
    BufferAssigned,
    Counting,
    Doubled,
    KeepsMask,
    KeepsOutput,
    NewDoubled,
    PositionalEmbedding,
    Result,
    Tied,
    TwoFactors,
    after_conv,
    after_linear,
    classes,
    encoder,
    first_of,
    gru,
    hidden_grad,
    hooked,
    images,
    in_place,
    inplace_dropout,
    lstm,
    negatives_to_zero,
    on,
    one_at_a_time,
    ones,
    packed,
    rnn,
    sequences,
    signals,
    targets,
    unless_nan,
    vectors,
    volumes,
    weights,
    with_doubled_weight,
    with_hook,
    with_linear,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Case:
    """A model in training mode, its input, and how its results may be rounded."""

    group: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    tolerance: float = 1e-10


CASES: list[Case] = [
    *(
        Case("Dense", name, make, inputs)
        for name, make, inputs in [
            ("Linear", lambda: nn.Linear(8, 8), vectors),
            ("Linear, without bias", lambda: nn.Linear(8, 8, bias=False), vectors),
            ("Linear of sequences", lambda: nn.Linear(8, 8), sequences),
            ("Linear of one sample", with_linear(lambda m, x: m(x[0])), vectors),
            ("Bilinear", on(lambda: nn.Bilinear(8, 8, 4), lambda m, x: m(x, x)), vectors),
            ("einsum", with_linear(lambda m, x: torch.einsum("nd,md->nm", m(x), m(x))), vectors),
            ("bmm", with_linear(lambda m, x: torch.bmm(m(x), m(x).mT)), sequences),
            ("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), vectors),
            ("spectral_norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), vectors),
            (
                "linalg.inv",
                with_linear(lambda m, x: torch.linalg.inv(m(x) @ m(x).mT + 9 * torch.eye(SAMPLES))),
                vectors,
            ),
            ("tied weights", Tied, words),
            ("positional embedding", PositionalEmbedding, sequences),
        ]
    ),
    *(
        Case("Embedding", name, make, words)
        for name, make in [
            ("Embedding", lambda: nn.Embedding(11, 8)),
            ("Embedding(padding_idx)", lambda: nn.Embedding(11, 8, padding_idx=3)),
            ("Embedding(padding_idx=-1)", lambda: nn.Embedding(11, 8, padding_idx=-1)),
            ("Embedding(max_norm)", lambda: nn.Embedding(11, 8, max_norm=1.0)),
            ("Embedding(scale_grad_by_freq)", lambda: nn.Embedding(11, 8, scale_grad_by_freq=True)),
            ("Embedding(sparse)", lambda: nn.Embedding(11, 8, sparse=True)),
            ("EmbeddingBag", lambda: nn.EmbeddingBag(11, 8)),
            ("EmbeddingBag(sparse)", lambda: nn.EmbeddingBag(11, 8, sparse=True)),
            ("one_hot", on(lambda: nn.Linear(11, 8), lambda m, x: m(F.one_hot(x, 11).to(m.weight.dtype)))),
        ]
    ),
    *(
        Case("Convolution", name, make, inputs)
        for name, make, inputs in [
            ("Conv1d", lambda: nn.Conv1d(8, 8, 3, padding=1), signals),
            ("Conv2d", lambda: nn.Conv2d(4, 6, 3, padding=1), images),
            ("Conv2d(stride, dilation)", lambda: nn.Conv2d(4, 6, 2, stride=2, dilation=2), images),
            ("Conv2d(padding='same')", lambda: nn.Conv2d(4, 6, 3, padding="same"), images),
            ("Conv2d(groups)", lambda: nn.Conv2d(4, 8, 3, groups=2), images),
            ("Conv2d(padding_mode='circular')", lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), images),
            ("Conv2d, twice", lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 3)), images),
            ("Conv3d", lambda: nn.Conv3d(2, 3, 3), volumes),
            ("ConvTranspose1d", lambda: nn.ConvTranspose1d(8, 4, 3), signals),
            ("ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 6, 4, 2, 1), images),
            ("ConvTranspose3d", lambda: nn.ConvTranspose3d(2, 3, 3), volumes),
            ("MaxPool1d", lambda: nn.Sequential(nn.Conv1d(8, 8, 1), nn.MaxPool1d(2)), signals),
            ("MaxPool2d", after_conv(lambda: nn.MaxPool2d(2)), images),
            ("AvgPool2d", after_conv(lambda: nn.AvgPool2d(2)), images),
            ("AdaptiveAvgPool2d", after_conv(lambda: nn.AdaptiveAvgPool2d(2)), images),
            ("AdaptiveMaxPool2d", after_conv(lambda: nn.AdaptiveMaxPool2d(2)), images),
            ("FractionalMaxPool2d", after_conv(lambda: nn.FractionalMaxPool2d(2, output_size=3)), images),
            ("Upsample(bilinear)", after_conv(lambda: nn.Upsample(scale_factor=2, mode="bilinear")), images),
            ("PixelShuffle", after_conv(lambda: nn.PixelShuffle(2)), images),
            ("Unfold", after_conv(lambda: nn.Unfold(2)), images),
            ("pad", after_conv(lambda: nn.ReflectionPad2d(1)), images),
            (
                "grid_sample",
                on(
                    lambda: nn.Conv2d(4, 4, 1),
                    lambda m, x: F.grid_sample(m(x), torch.zeros(SAMPLES, 3, 3, 2), align_corners=False),
                ),
                images,
            ),
            (
                "grid_sample after BatchNorm2d",
                on(
                    lambda: nn.BatchNorm2d(4),
                    lambda m, x: F.grid_sample(m(x), torch.zeros(SAMPLES, 3, 3, 2), align_corners=False),
                ),
                images,
            ),
        ]
    ),
    *(
        Case("Normalization", name, make, inputs)
        for name, make, inputs in [
            ("BatchNorm1d", lambda: nn.BatchNorm1d(8), vectors),
            ("BatchNorm2d", lambda: nn.BatchNorm2d(4), images),
            ("BatchNorm1d(momentum=None)", lambda: nn.BatchNorm1d(8, momentum=None), vectors),
            ("BatchNorm1d(track_running_stats=False)", lambda: nn.BatchNorm1d(8, track_running_stats=False), vectors),
            ("BatchNorm1d, eval", lambda: nn.BatchNorm1d(8).eval(), vectors),
            ("InstanceNorm2d", lambda: nn.InstanceNorm2d(4, affine=True), images),
            ("GroupNorm", lambda: nn.GroupNorm(2, 4), images),
            ("LayerNorm", lambda: nn.LayerNorm(8), vectors),
            ("RMSNorm", lambda: nn.RMSNorm(8), vectors),
            ("LocalResponseNorm", after_conv(lambda: nn.LocalResponseNorm(2)), images),
        ]
    ),
    *(
        Case("Recurrent", name, make, inputs)
        for name, make, inputs in [
            ("LSTM", lstm(batch_first=True), sequences),
            ("LSTM(batch_first=False)", lstm(), sequences),
            ("LSTM(num_layers=2, bidirectional)", lstm(num_layers=2, bidirectional=True, batch_first=True), sequences),
            ("LSTM(num_layers=2, dropout)", lstm(num_layers=2, dropout=0.3), sequences),
            ("LSTM(bias=False)", lstm(bias=False), sequences),
            ("LSTM(proj_size)", lstm(proj_size=3), sequences),
            ("LSTM of one sequence", on(lstm(), lambda m, x: m(x[0])), sequences),
            ("LSTM of packed sequences", on(lstm(batch_first=True), packed), sequences),
            ("GRU", gru(batch_first=True), sequences),
            ("GRU(num_layers=2, bidirectional)", gru(num_layers=2, bidirectional=True), sequences),
            ("GRU(num_layers=2, dropout)", gru(num_layers=2, dropout=0.3), sequences),
            ("RNN", rnn(), sequences),
            ("RNN(num_layers=2, relu)", rnn(num_layers=2, nonlinearity="relu"), sequences),
            ("LSTMCell", first_of(lambda: nn.LSTMCell(8, 8)), vectors),
            ("GRUCell", lambda: nn.GRUCell(8, 8), vectors),
            ("RNNCell", lambda: nn.RNNCell(8, 8), vectors),
        ]
    ),
    *(
        Case("Attention", name, make, sequences)
        for name, make in [
            ("scaled_dot_product_attention", Attention),
            ("scaled_dot_product_attention(is_causal)", lambda: Attention(causal=True)),
            (
                "scaled_dot_product_attention(attn_mask)",
                lambda: Attention(mask=lambda x: torch.ones(5, 5, dtype=torch.bool).tril()),
            ),
            (
                "scaled_dot_product_attention(attn_mask of each sample)",
                lambda: Attention(mask=lambda x: x[:, None, :, :1] * x[:, None, None, :, 0]),
            ),
            ("scaled_dot_product_attention(dropout_p)", lambda: Attention(dropout=0.3)),
            (
                "MultiheadAttention",
                on(lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, x, x)),
            ),
            (
                "MultiheadAttention(need_weights=False)",
                on(lambda: nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x, need_weights=False)[0]),
            ),
            (
                "MultiheadAttention(dropout)",
                on(lambda: nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True), lambda m, x: m(x, x, x)),
            ),
            (
                "MultiheadAttention(key_padding_mask)",
                on(
                    lambda: nn.MultiheadAttention(8, 2, batch_first=True),
                    lambda m, x: m(x, x, x, key_padding_mask=torch.arange(5).expand(SAMPLES, 5) > 3)[0],
                ),
            ),
            ("TransformerEncoderLayer", encoder()),
            ("TransformerEncoderLayer(norm_first)", encoder(norm_first=True)),
            ("TransformerEncoderLayer(dropout)", encoder(dropout=0.1)),
            (
                "TransformerDecoderLayer(dropout)",
                on(lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.1, batch_first=True), lambda m, x: m(x, x)),
            ),
        ]
    ),
    *(
        Case("Random numbers", name, make, inputs)
        for name, make, inputs in [
            ("Dropout", after_linear(lambda: nn.Dropout(0.3)), vectors),
            ("Dropout(inplace)", with_linear(inplace_dropout), vectors),
            ("Dropout(p=1, inplace)", with_linear(lambda m, x: inplace_dropout(m, x, 1.0)), vectors),
            ("Dropout of the input", lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 8)), vectors),
            ("Dropout of transposed values", with_linear(lambda m, x: F.dropout(m(x).transpose(0, 1), 0.4)), sequences),
            ("Dropout(p=1)", after_linear(lambda: nn.Dropout(1.0)), vectors),
            ("Dropout1d", lambda: nn.Sequential(nn.Conv1d(8, 8, 1), nn.Dropout1d(0.3)), signals),
            ("Dropout2d", after_conv(lambda: nn.Dropout2d(0.3)), images),
            ("AlphaDropout", after_linear(lambda: nn.AlphaDropout(0.3)), vectors),
            ("FeatureAlphaDropout", after_conv(lambda: nn.FeatureAlphaDropout(0.3)), images),
            ("RReLU", after_linear(nn.RReLU), vectors),
            ("gumbel_softmax", with_linear(lambda m, x: F.gumbel_softmax(m(x))), vectors),
            ("randn_like", with_linear(lambda m, x: m(x) + torch.randn_like(m(x))), vectors),
            ("rand", with_linear(lambda m, x: m(x) + torch.rand(SAMPLES, 8)), vectors),
            ("randint, indexing", with_linear(lambda m, x: m(x)[torch.randint(SAMPLES, (4,))]), vectors),
            (
                "randperm, index_select",
                with_linear(lambda m, x: m(x).index_select(0, torch.randperm(SAMPLES))),
                vectors,
            ),
            ("empty().normal_()", with_linear(lambda m, x: m(x) + torch.empty(SAMPLES, 8).normal_()), vectors),
            ("bernoulli", with_linear(lambda m, x: m(x) * torch.bernoulli(m(x).sigmoid().detach())), vectors),
            ("multinomial", with_linear(lambda m, x: m(x).gather(1, m(x).softmax(1).detach().multinomial(2))), vectors),
            (
                "generator of its own",
                with_linear(lambda m, x: m(x) + torch.rand(8, generator=torch.Generator().manual_seed(3))),
                vectors,
            ),
        ]
    ),
    *(
        Case("Activations", name, make, vectors)
        for name, make in [
            ("ReLU", after_linear(nn.ReLU)),
            ("ReLU(inplace)", after_linear(lambda: nn.ReLU(inplace=True))),
            ("GELU, SiLU, Softplus", after_linear(nn.GELU, nn.SiLU, nn.Softplus)),
            ("ELU, SELU, LeakyReLU", after_linear(nn.ELU, nn.SELU, nn.LeakyReLU)),
            ("Tanh, Sigmoid, Mish", after_linear(nn.Tanh, nn.Sigmoid, nn.Mish)),
            ("GLU", after_linear(nn.GLU)),
            ("PReLU", after_linear(nn.PReLU)),
            ("Softmax", after_linear(lambda: nn.Softmax(-1))),
        ]
    ),
    *(
        Case("Losses in the model", name, make, vectors)
        for name, make in [
            ("cross_entropy", classes(lambda m, x: F.cross_entropy(m(x), targets()))),
            ("cross_entropy(reduction='sum')", classes(lambda m, x: F.cross_entropy(m(x), targets(), reduction="sum"))),
            (
                "cross_entropy(reduction='none')",
                classes(lambda m, x: F.cross_entropy(m(x), targets(), reduction="none")),
            ),
            ("cross_entropy(weight)", classes(lambda m, x: F.cross_entropy(m(x), targets(), weight=weights()))),
            (
                "cross_entropy(label_smoothing)",
                classes(lambda m, x: F.cross_entropy(m(x), targets(), label_smoothing=0.1)),
            ),
            (
                "cross_entropy(weight, label_smoothing)",
                classes(lambda m, x: F.cross_entropy(m(x), targets(), weight=weights(), label_smoothing=0.1)),
            ),
            ("cross_entropy(ignore_index)", classes(lambda m, x: F.cross_entropy(m(x), targets(), ignore_index=0))),
            ("cross_entropy of probabilities", classes(lambda m, x: F.cross_entropy(m(x), x[:, :5].softmax(1)))),
            ("nll_loss", classes(lambda m, x: F.nll_loss(F.log_softmax(m(x), 1), targets()))),
            ("mse_loss", with_linear(lambda m, x: F.mse_loss(m(x), x))),
            ("l1_loss, smooth_l1_loss", with_linear(lambda m, x: F.l1_loss(m(x), x) + F.smooth_l1_loss(m(x), x))),
            (
                "binary_cross_entropy_with_logits",
                with_linear(lambda m, x: F.binary_cross_entropy_with_logits(m(x), ones(x))),
            ),
            (
                "kl_div",
                with_linear(lambda m, x: F.kl_div(F.log_softmax(m(x), 1), x.softmax(1), reduction="batchmean")),
            ),
            ("triplet_margin_loss", with_linear(lambda m, x: F.triplet_margin_loss(m(x), m(x).flip(0), x))),
            ("cosine_similarity", with_linear(lambda m, x: F.cosine_similarity(m(x), x).mean())),
        ]
    ),
    Case(
        "Losses in the model",
        "ctc_loss",
        on(
            lambda: nn.Linear(8, 5),
            lambda m, x: F.ctc_loss(
                m(x).transpose(0, 1).log_softmax(-1),
                torch.ones(SAMPLES, 2, dtype=torch.long),
                torch.full((SAMPLES,), 5),
                torch.full((SAMPLES,), 2),
            ),
        ),
        sequences,
    ),
    *(
        Case("Indexing and writing", name, make, inputs)
        for name, make, inputs in [
            ("gather", classes(lambda m, x: m(x).gather(1, targets()[:, None])), vectors),
            ("scatter_add", with_linear(lambda m, x: torch.zeros(5, 8).index_add(0, targets(), m(x))), vectors),
            ("cumsum, sort, topk", with_linear(lambda m, x: m(x).cumsum(1).sort(1)[0].topk(3)[0]), vectors),
            ("max(dim)", on(lambda: nn.Conv1d(8, 8, 1), lambda m, x: m(x).max(2)[0]), signals),
            ("where", with_linear(lambda m, x: torch.where(m(x) > 0, m(x), x)), vectors),
            ("in place on zeros()", with_linear(lambda m, x: in_place(m, x, torch.zeros(SAMPLES, 8))), vectors),
            ("in place on new_zeros()", with_linear(lambda m, x: in_place(m, x, m(x).new_zeros(SAMPLES, 8))), vectors),
            ("in place on ones()", with_linear(lambda m, x: in_place(m, x, torch.ones(SAMPLES, 8))), vectors),
            ("out[:, t] = …", with_linear(one_at_a_time), sequences),
            ("y[y < 0] = 0", with_linear(negatives_to_zero), vectors),
            ("masked_fill", with_linear(lambda m, x: m(x).masked_fill(m(x) < 0, 0.0)), vectors),
            ("y[y > 0]", with_linear(lambda m, x: m(x)[m(x) > 0].sum()), vectors),
            ("input changed in place", with_linear(lambda m, x: m(x.mul_(2.0))), vectors),
        ]
    ),
    *(
        Case("Control", name, make, vectors)
        for name, make in [
            (".item()", with_linear(lambda m, x: m(x) * m(x).abs().max().item())),
            ("if y.sum() > 0", with_linear(lambda m, x: m(x) if m(x).sum() > m.bias.sum() else -m(x))),
            ("if y.isnan().any()", with_linear(unless_nan)),
            (".tolist()", with_linear(lambda m, x: m(x) * m(x)[0, 0].tolist())),
            (".numpy()", with_linear(lambda m, x: m(x) * float(m(x).detach().numpy().max()))),
            ("autograd.grad", with_linear(hidden_grad)),
            ("hook on a gradient", with_linear(hooked)),
            ("forward hook", with_hook),
            ("buffer assigned anew", BufferAssigned),
            ("attribute assigned", Counting),
            ("attribute assigned: a mask", KeepsMask),
            ("attribute assigned: of the batch", KeepsOutput),
            ("autocast (bfloat16)", Autocast),
            (
                "checkpoint(use_reentrant=False)",
                with_linear(lambda m, x: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False)),
            ),
            (
                "checkpoint(use_reentrant=True)",
                with_linear(lambda m, x: torch.utils.checkpoint.checkpoint(torch.tanh, m(x), use_reentrant=True)),
            ),
            ("autograd.Function", with_linear(lambda m, x: Doubled.apply(m(x)))),
            (
                "autograd.Function(setup_context)",
                with_linear(lambda m, x: list(TwoFactors.apply(x, m.weight, 3))),
            ),
            ("autograd.Function(generate_vmap_rule)", with_linear(lambda m, x: NewDoubled.apply(m(x)))),
            ("vmap", with_linear(lambda m, x: torch.vmap(m)(x))),
            ("func.grad", with_linear(lambda m, x: torch.func.grad(lambda value: m(value).sum())(x))),
            ("func.functional_call", with_linear(with_doubled_weight)),
            (
                "distributions.Normal.rsample",
                with_linear(lambda m, x: torch.distributions.Normal(m(x), m(x).exp()).rsample()),
            ),
            ("returns a dataclass", with_linear(lambda m, x: Result(m(x).sum(), [m(x), x]))),
            ("returns a distribution", with_linear(lambda m, x: torch.distributions.Normal(m(x), 1.0))),
        ]
    ),
]
