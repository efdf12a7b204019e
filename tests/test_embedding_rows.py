"""The tokens that rows of an embedding tell, against those that the texts hold, after steps of torch's optimisers."""

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmjp.attacks.embedding_rows import read_tokens
from fedmjp.errors import AttackNotApplicableError
from fedmjp.models.layers import LayeredNetwork

VOCABULARY, PADDING = 300, 0
Optimisers = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class Reader(nn.Module):
    """A classifier of texts, or with a tied output layer a model of their next tokens."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, 8, padding_idx=PADDING), nn.Embedding(12, 8)
        self.output = nn.Linear(8, VOCABULARY if tied else 3)
        if tied:
            self.output.weight = self.words.weight

    def forward(self, texts: Tensor) -> Tensor:
        read = self.words(texts) + self.places(torch.arange(texts.shape[1]))
        return self.output(torch.tanh(read).mean(1))  # type: ignore[no-any-return]


def texts_of(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, 90, (count, 12), generator=generator)
    texts[:, 9:] = PADDING
    return texts


def change_of(module: nn.Module, texts: Tensor, optimiser: Optimisers, steps: int) -> dict[str, Tensor]:
    trained = copy.deepcopy(module)
    takes = optimiser(trained.parameters())
    for _ in range(steps):
        takes.zero_grad()
        torch.autograd.backward(F.cross_entropy(trained(texts), torch.arange(len(texts)) % 3))
        takes.step()
    before = dict(module.named_parameters())
    return {name: value.detach() - before[name].detach() for name, value in trained.named_parameters()}


def layered(module: nn.Module) -> LayeredNetwork:
    names = frozenset(name for name, _ in module.named_parameters())
    return LayeredNetwork(module, (12,), names, whole_numbers=True)


@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize(
    "optimiser",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=1e-3),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-2),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-4),
    ],
)
def test_the_tokens_of_the_texts_are_told_after_any_steps(optimiser: Optimisers, steps: int) -> None:
    module, texts = Reader(), texts_of(8)
    tokens = read_tokens(layered(module), change_of(module, texts, optimiser, steps), steps)
    assert (tokens.layer, tokens.vocabulary, tokens.padding) == ("words", VOCABULARY, PADDING)
    assert set(tokens.rows.tolist()) == set(texts.flatten().tolist()) - {PADDING}


def test_where_every_row_moves_or_none_it_is_refused() -> None:
    texts = texts_of(4)
    plain, tied = Reader(), Reader(tied=True)
    change = change_of(plain, texts, lambda parameters: torch.optim.Adam(parameters, lr=1e-3), 1)
    with pytest.raises(AttackNotApplicableError, match=r"words is tied to output\.weight"):
        read_tokens(layered(tied), {name: torch.ones_like(value) for name, value in tied.named_parameters()})
    in_loss = change_of(plain, texts, lambda parameters: torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-2), 1)
    noise = {"words.weight": change["words.weight"] + 1e-4 * torch.rand(VOCABULARY, 8, generator=torch.Generator())}
    for moved in (noise, {"words.weight": in_loss["words.weight"].index_fill(0, torch.tensor(PADDING), 1.0)}):
        with pytest.raises(AttackNotApplicableError, match="every row of words moved"):
            read_tokens(layered(plain), moved)
    with pytest.raises(AttackNotApplicableError, match="no row of words moved"):
        read_tokens(layered(plain), {"words.weight": torch.zeros(VOCABULARY, 8)})
    with pytest.raises(AttackNotApplicableError, match="needs an embedding"):
        read_tokens(layered(plain), {"output.bias": change["output.bias"]})
