"""The plot of the page on claims: the number of claims with each verdict."""

import tables

from experiments.checking import table, verdicts

COLORS = {
    verdicts.HELD: "#009E73",
    verdicts.IN_PART: "#E69F00",
    verdicts.NOT: "#D55E00",
    verdicts.OPEN: "#7A9CC6",
    verdicts.NOT_TRIED: "#C9C9C9",
}


def verdict_bars(checked):
    """Return bars of claims by verdict: those of papers, and those of ours."""
    groups = {
        "papers": [row for row in checked if row.claim.seen != "ours"],
        "ours": [row for row in checked if row.claim.seen == "ours"],
    }

    figure, axes = tables._figure(2.2)
    left = dict.fromkeys(groups, 0)
    for verdict, color in COLORS.items():
        numbers = {name: table.counts(rows)[verdict] for name, rows in groups.items()}
        drawn = axes.barh(
            list(groups),
            list(numbers.values()),
            left=list(left.values()),
            color=color,
            label=verdict,
        )
        labels = [str(number) if number else "" for number in numbers.values()]
        axes.bar_label(drawn, labels, label_type="center", color="white")
        left = {name: left[name] + numbers[name] for name in groups}

    axes.invert_yaxis()
    axes.set_xlabel("claims")
    return tables._svg(figure, legend=True)
