"""A campaign as workers on other machines find it, and whether one of them would make the same trials."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch

from fedmjp import provenance
from fedmjp.arithmetic import Arithmetic
from fedmjp.benchmarks.campaign.prepare import Prepared, plan_of, source_of
from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.benchmarks.plan.experiment import Plan
from fedmjp.benchmarks.plan.planning import DECISIVE
from fedmjp.config import Config
from fedmjp.data.pictures import PictureEntry
from fedmjp.data.selection import Selection, pick
from fedmjp.errors import BadInputError, DataError
from fedmjp.metrics import metric

AGAIN = "or start the campaign again from this one"


class SharedCampaign(Config):
    """What a worker must know of a campaign, and what must be the same where it works.

    Attributes:
        campaign: The file's content.
        device: Where attacks run.
        arithmetic: Of clients, where the file states none.
        pictures: Those that were chosen, with their content's digests.
        code: Digest of our own code.
        commit: That it is of; none outside a checkout.
        versions: Of packages that can change a trial's numbers.
        metrics: Those that the machine could compute.
        plan: Digest of all trials.
    """

    campaign: Campaign
    device: Literal["cpu", "cuda"]
    arithmetic: Arithmetic
    pictures: tuple[PictureEntry, ...]
    code: str
    commit: str | None
    versions: Mapping[str, str]
    metrics: tuple[str, ...]
    plan: str

    @classmethod
    def of(cls, prepared: Prepared, *, device: Literal["cpu", "cuda"], arithmetic: Arithmetic) -> Self:
        """Of a campaign that was prepared here."""
        return cls(
            campaign=prepared.campaign,
            device=device,
            arithmetic=arithmetic,
            pictures=prepared.selection.entries,
            code=provenance.code_digest(),
            commit=provenance.revision()["commit"],
            versions=_versions(),
            metrics=_computed(prepared.campaign),
            plan=digest_of(prepared.plan),
        )

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """What was written of it; BadInputError if another fedmjp wrote it, whose keys may be others."""
        if content.get("code") != provenance.code_digest():
            commit = f" of commit {content['commit'][:12]}" if content.get("commit") else ""
            raise BadInputError(f"fedmjp here is another than the campaign's; install that{commit}, {AGAIN}")
        return cls.parse(content)

    def moved_to(self, source: str) -> Self:
        """The same with its pictures elsewhere."""
        data = self.campaign.data.model_copy(update={"source": source})
        return self.model_copy(update={"campaign": self.campaign.model_copy(update={"data": data})})

    def prepare(self) -> tuple[Selection, Plan]:
        """The pictures and the plan, which are those of where the campaign was started.

        Raises:
            BadInputError: If this machine would make other trials: the first reason.
        """
        self._require_machine()
        selection = self._selection()
        planned = plan_of(self.campaign, selection, device=self.device, arithmetic=self.arithmetic)
        if digest_of(planned) != self.plan:
            raise BadInputError(
                "this machine plans other trials than the campaign has: weights, or the package of an attack or a "
                f"defence, are others; bring the same, {AGAIN}"
            )
        return selection, planned

    def _require_machine(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise BadInputError("the campaign computes on CUDA, and torch sees no CUDA device on this machine")
        for name, version in _versions().items():
            if version != self.versions.get(name):
                raise BadInputError(
                    f"{name} is {version} here, the campaign's is {self.versions.get(name)}; install that, {AGAIN}"
                )
        if _computed(self.campaign) != self.metrics:
            other = ", ".join(sorted({*_computed(self.campaign)} ^ {*self.metrics}))
            raise BadInputError(
                f"{other}: computed on one of this machine and the campaign's, not on the other; `fedmjp doctor` says "
                "what is missing"
            )

    def _selection(self) -> Selection:
        source = self.campaign.data.source
        try:
            selection = pick(source_of(self.campaign), [entry.name for entry in self.pictures])
        except DataError as error:
            raise DataError(f"{error} (a worker needs the campaign's pictures; --data says where they are)") from None
        for entry, found in zip(self.pictures, selection.entries, strict=True):
            if entry != found:
                raise DataError(
                    f"picture {entry.name!r} in {source} is not the campaign's, or of another class; "
                    "--data says where its pictures are"
                )
        return selection


def digest_of(plan: Plan) -> str:
    """SHA-256 of a plan's trials."""
    return hashlib.sha256(json.dumps([trial.key for trial in plan.trials]).encode()).hexdigest()


def _versions() -> dict[str, str]:
    versions = provenance.versions()
    return {name: versions[name] for name in DECISIVE}


def _computed(campaign: Campaign) -> tuple[str, ...]:
    return tuple(name for name in campaign.metrics if metric(name).missing() is None)
