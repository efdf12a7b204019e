"""One upload whose embeddings were withheld: the first block's gradients alone state its tokens."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import Attack, picture
from fedmjp.attacks.first_block import block
from fedmjp.attacks.first_block.block import FC1_WEIGHT, FC2_WEIGHT
from fedmjp.attacks.first_block.certificate import NetworkPass, body_tensors, pass_tokens
from fedmjp.attacks.first_block.equations import Span, TokenEquations
from fedmjp.attacks.first_block.joint import JointCost, refine
from fedmjp.attacks.first_block.places import TokenEmbedding, by_slopes, in_place
from fedmjp.attacks.first_block.search import find_near, find_tokens
from fedmjp.attacks.first_block.starts import NaturalStarts
from fedmjp.attacks.first_block.tokens import PartialTokens, centred, class_token, entering
from fedmjp.attacks.labels import labels_of, mean_gradient
from fedmjp.attacks.natural_patches import prior_refusal
from fedmjp.attacks.token_gradients import positions_refusal
from fedmjp.config import Config
from fedmjp.errors import AttackFailedError
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

MOST_UNKNOWNS = 3200  # of a joint search: its matrix is formed
SEARCHED = 0.8  # of the time, for searches; what comes after them takes some 30 seconds of DeiT-S
TURNS = 2  # in which tokens, their places and what fills the others follow from each other


class FirstMlpOptions(Config):
    """Budget of ``first_mlp`` and its variants."""

    rounds: int = Field(25, ge=1, description="of the search for tokens, at most")
    starts: int = Field(96, ge=1, description="points that each round starts from")
    seconds: float = Field(
        240.0, gt=0, allow_inf_nan=False, description="of work of one core, after which no search goes on"
    )
    steps: int = Field(15, ge=0, description="of the joint search at most, where one pays; 0 for none")


class FirstMlp(Attack[VitClassifier]):
    """Read tokens off the first block, whatever was done to the embeddings' gradients.

    The gradients of the first MLP single out every token behind the first attention (``equations``), as a set, by
    search from random points (``search``). The rest is linear: slopes, deviations and the attention's output, and so
    the tokens that enter the block (``tokens``). Their order comes from the position embeddings, which the server
    knows: a token in a wrong place makes an unnatural patch (``places``). What the patch embedding does not show of a
    patch, because it has fewer dimensions than values, the prior of pictures fills. Where some tokens are not met,
    those that are lead back one by one (``some``), and the prior fills the places that are left (``filling``). Small
    pictures that are not certain by then are searched all at once (``joint``).

    Searches end when the thread has worked for most of ``seconds``: what is met depends on the machine.

    ``tokens_certified`` is 1 if these tokens, passed through the network, give the gradients of everything behind
    them as they were uploaded. It speaks of them as a set: not of their order, nor of what no token shows.
    """

    name = "first_mlp"
    paper = "ours: follows from the chain rule through the first MLP"
    summary = "one upload without its embeddings: all tokens from the first block's gradients, then patches"
    requires = (
        "the gradient, or the weight delta of one step, of one picture, of everything behind the tokens; an "
        "undefended pre-norm vision transformer with GELU, with fewer tokens than dimensions; an image size that the "
        "prior knows"
    )
    exploits = "the first MLP's gradients span its activations; every token is an isolated point of that span"
    options_type = FirstMlpOptions
    stack = 1
    optimises = True
    uses_natural_patches = True
    besides: ClassVar[tuple[str, ...]] = ()  # gradients of embeddings that it reads

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Return the names of all gradients behind the tokens, and of the embeddings' that are read besides."""
        return [*body_tensors(model), *self.besides]

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Require one step on one picture, the first block written out in ``block``, few tokens, and the prior."""
        if threat.batch_size != 1 or (threat.local_steps != 1 and threat.update == "delta"):
            return "needs one step on a single picture: more of either sums up more tokens than there are dimensions"
        if refusal := positions_refusal(model):
            return refusal
        if model.defended or model.index_embedding is not None:
            return "needs a model without MJP, whose masks and second embedding it does not know"
        return block.refusal(model) or _rank_refusal(model) or prior_refusal(model)

    @torch.no_grad()
    @override
    def reconstruct(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: torch.Generator
    ) -> Reconstruction:
        began = time.thread_time()
        gradients = {name: mean_gradient(upload, name, model, threat) for name in self.tensors(model)}
        first, fc2 = block.first_block(model), block.linear_of(model, "0.mlp.fc2")
        equations = TokenEquations(first, fc2, gradients[FC1_WEIGHT], gradients[FC2_WEIGHT], 1 + model.grid**2)
        equations = replace(equations, until=began + SEARCHED * self.options.seconds)
        draw = NaturalStarts.of(model).draw
        found_tokens = find_tokens(equations, self.options.rounds, self.options.starts, generator, draw=draw)
        if not len(found_tokens):
            raise AttackFailedError(f"{self.name}: no token was met in {self.options.seconds:g} seconds of work")
        label, embedding = labels_of(upload, model, threat)[0], TokenEmbedding.of(model)
        setting, steps = _Setting(model, gradients, embedding, label, threat.label_smoothing), 0
        if len(found_tokens) < equations.count:
            patches = self._of_some(found_tokens, equations, setting)
            network_pass = setting.pass_tokens(embedding.tokens(patches))
        else:
            tokens = _of_all(found_tokens, gradients, model)
            network_pass = setting.pass_tokens(tokens)
            patches = self._patches(tokens, network_pass.slopes[1:], setting)
        if not network_pass.certifies and patches.numel() <= MOST_UNKNOWNS and self.options.steps:
            patches, steps = self._refined(patches, equations, setting)
            network_pass = setting.pass_tokens(embedding.tokens(patches))
        return Reconstruction(
            picture(patches, model),
            {
                "tokens_certified": float(network_pass.certifies),
                "residual": network_pass.residual,
                "tokens_met": float(len(found_tokens)),
                "steps": float(steps),
                "seconds": time.thread_time() - began,
            },
        )

    def _of_some(self, found_tokens: Tensor, equations: TokenEquations, setting: "_Setting") -> Tensor:
        """Solve for patches (patches, values) from some of the tokens; the prior fills the remaining places."""
        model, gradients, embedding = setting.model, setting.gradients, setting.embedding
        some = PartialTokens.of(equations, gradients, found_tokens, model)
        found_tokens = found_tokens[some.rows]
        if not len(found_tokens):
            raise AttackFailedError(f"{self.name}: no token but the class token was met")
        tokens = some.entering(None)
        places = embedding.by_prior(tokens, model)
        patches = embedding.patches(tokens, places, model)
        for _ in range(TURNS):
            all_tokens = embedding.tokens(patches)
            is_empty = torch.ones_like(all_tokens[:, 0], dtype=torch.bool)
            is_empty[places] = False
            empty = is_empty.nonzero().flatten()
            new, of_guess = find_near(equations, found_tokens, some.guesses(all_tokens, empty))
            if len(new):
                found_tokens, places = torch.cat([found_tokens, new]), torch.cat([places, empty[of_guess]])
                some = PartialTokens.of(equations, gradients, found_tokens, model)
                found_tokens, places = found_tokens[some.rows], places[some.rows]
            tokens = some.entering(all_tokens)
            slopes = setting.pass_tokens(all_tokens).slopes[1:]
            places = self._places(tokens, slopes[places], setting)
            patches = embedding.patches(tokens, places, model)
        return patches

    def _patches(self, tokens: Tensor, slopes: Tensor, setting: "_Setting") -> Tensor:
        """Solve for patches (patches, values) in their places, from tokens and slopes (patches, dim) in any order."""
        return setting.embedding.patches(tokens, self._places(tokens, slopes, setting), setting.model)

    def _places(self, tokens: Tensor, slopes: Tensor, setting: "_Setting") -> Tensor:
        """Find places (tokens,) of tokens (tokens, dim), perhaps not all of the picture's, with their slopes."""
        del slopes
        return setting.embedding.by_prior(tokens, setting.model)

    def _refined(self, patches: Tensor, equations: TokenEquations, setting: "_Setting") -> tuple[Tensor, int]:
        """Search all patches at once; return them and the number of steps."""
        embedding, steps = setting.embedding, self.options.steps
        fixed = torch.cat([centred(class_token(setting.model))[None], embedding.shift + embedding.positions])
        queries = Span.of(setting.gradients[names.FIRST_QKV_WEIGHT], equations.count)
        joint = JointCost(equations, queries, embedding.weight, fixed, embedding.prior)
        return refine(joint, patches, steps, lambda step, cost: self.on_progress(step, steps, cost))


class FirstMlpPositions(FirstMlp):
    """``first_mlp`` with the position embedding's gradient: its rows tell the place of each token's slope."""

    name = "first_mlp_positions"
    summary = "first_mlp with the position embedding's gradient, which tells places: for a patch embedding withheld"
    exploits = f"{FirstMlp.exploits}; the position embedding's gradient has one row per place"
    besides = (names.POSITION_EMBEDDING,)

    def _places(self, tokens: Tensor, slopes: Tensor, setting: "_Setting") -> Tensor:
        del tokens
        return by_slopes(slopes, setting.gradients[names.POSITION_EMBEDDING][0, 1:])


class FirstMlpPatches(FirstMlp):
    """``first_mlp`` with the patch embedding's gradient: with the tokens' slopes it states whole patches."""

    name = "first_mlp_patches"
    summary = "first_mlp with the patch embedding's gradient, which states patches: for positions withheld"
    exploits = f"{FirstMlp.exploits}; the patch embedding's gradient is linear in the patches"
    besides = (names.PATCH_WEIGHT,)

    def _patches(self, tokens: Tensor, slopes: Tensor, setting: "_Setting") -> Tensor:
        if setting.embedding.shows_all:  # then tokens are the more exact source
            return super()._patches(tokens, slopes, setting)
        right = setting.gradients[names.PATCH_WEIGHT].flatten(1)
        patches = torch.linalg.lstsq(slopes.mT, right).solution
        return in_place(patches, setting.embedding.by_patches(tokens, patches))


@dataclass(frozen=True)
class _Setting:
    """What the server knows of one upload."""

    model: VitClassifier
    gradients: Mapping[str, Tensor]
    embedding: TokenEmbedding
    label: int
    smoothing: float  # of labels, in the clients' loss

    def pass_tokens(self, tokens: Tensor) -> NetworkPass:
        """Pass tokens (patches, dim), without the class token, through the network and back."""
        all_tokens = torch.cat([centred(class_token(self.model))[None], tokens])
        return pass_tokens(self.model, self.gradients, all_tokens, self.label, self.smoothing)


def _of_all(whitened: Tensor, gradients: Mapping[str, Tensor], model: VitClassifier) -> Tensor:
    """Solve for the tokens (patches, dim) that enter, in no order, from all whitened tokens (1 + patches, dim)."""
    tokens = entering(model, gradients, whitened).tokens
    away = (tokens - centred(class_token(model))).norm(dim=1)
    return tokens[torch.arange(len(tokens), device=tokens.device) != away.argmin()]


def _rank_refusal(model: VitClassifier) -> str | None:
    """Say why the gradients of the first MLP do not span all tokens; None if they do."""
    tokens = 1 + model.grid**2
    hidden, dim = model.backbone.blocks[0].mlp.fc1.weight.shape
    if tokens >= dim:  # slopes behind LayerNorms sum to zero over the dimensions
        return f"{tokens} tokens are not fewer than their {dim} dimensions: the gradients do not span them all"
    if hidden <= 2 * tokens:
        return f"an MLP {hidden} wide has too few equations for the slopes of {tokens} tokens"
    return None
