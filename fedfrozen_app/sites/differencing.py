"""Refuse sums that reveal more together than alone: over almost the same sites, from the same model.

The difference of a sum over five sites and one over four of them is the fifth site's update. A site therefore
remembers, in its audit log, the sums that it has agreed to. Together they reveal sums over groups: the sites
that were always in the same sums. A site agrees to a further sum only if every group still has `min_cohort`
sites. Repeating the same sites reveals nothing more, and neither do fixed batches of sites (So et al., arXiv
2106.03328).

Which sums count together is the policy's `differencing`: all of one view, or (`model`) those from the same
model. A run with differential privacy is bound by its epsilon and not by this.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fedfrozen_app.sites.refusals import RequestRefused

Sites = frozenset[str]


@dataclass(frozen=True)
class MaskedSum:
    """A masked sum of updates, as far as differencing depends on it."""

    session: str
    round: int
    model: str  # digest of the arrays that all of its sites started from
    view: str
    private: bool  # bound by epsilon

    def entry(self, survivors: Iterable[str]) -> dict[str, Any]:
        """For the audit log."""
        about: dict[str, Any] = {"round": self.round, "survivors": sorted(survivors)}
        return about if self.private else {**about, "model": self.model, "view": self.view}


@dataclass
class SumMemory:
    """The sums that the site has agreed to, by model and by view."""

    _by_model: dict[str, set[Sites]] = field(default_factory=lambda: defaultdict(set))
    _by_view: dict[str, set[Sites]] = field(default_factory=lambda: defaultdict(set))

    def learn(self, entry: dict[str, Any]) -> None:
        """Add a `confirmed` line of the audit log; one of a private run, or of an earlier version, has no
        model."""
        if "model" in entry:
            sites = frozenset(entry["survivors"])
            self._by_model[entry["model"]].add(sites)
            self._by_view[entry["view"]].add(sites)

    def check(self, asked: MaskedSum, sites: Iterable[str], rule: str, fewest: int) -> None:
        """Refuse a sum that would leave a group of fewer than `fewest` sites."""
        if asked.private:
            return
        earlier = self._by_view[asked.view] if rule == "data" else self._by_model[asked.model]
        new = groups_of([*earlier, frozenset(sites)]) - groups_of(earlier)
        small = min(new, key=lambda group: (len(group), sorted(group)), default=None)
        if earlier and small is not None and len(small) < fewest:
            what = "of this view" if rule == "data" else "from this model"
            raise RequestRefused(
                f"with the earlier sums {what}, the sum would tell the updates of {', '.join(sorted(small))} "
                f"apart from all others, and {fewest} sites are the fewest"
            )


def groups_of(cohorts: Iterable[Sites]) -> set[Sites]:
    """The groups of sites that are in the same cohorts: every sum that can be derived from those of the
    cohorts is over whole groups."""
    known = list(dict.fromkeys(cohorts))
    groups: dict[tuple[bool, ...], set[str]] = defaultdict(set)
    for site in frozenset().union(*known):
        groups[tuple(site in cohort for cohort in known)].add(site)
    return set(map(frozenset, groups.values()))
