"use strict";
// What overview, compare and trend draw alike: stacked bars, and the line of the capacity.

function capacityLine(at) {
  return {
    markLine: {
      symbol: "none",
      silent: true,
      lineStyle: { color: theme("bad"), width: 2, type: "solid" },
      label: { formatter: say("capacity"), color: theme("bad"), position: "insideEndTop" },
      data: [at],
    },
  };
}

// parts: [{name, values}], a value per label: those that are nothing anywhere are left out, the
// others keep their colours; capacity: 0 for none; said: for screen readers.
function stackedBars(id, height, labels, parts, { unit, capacity, said, labelStyle = {} }) {
  const seen = parts
    .map((one, i) => ({ ...one, color: PALETTE[i % PALETTE.length] }))
    .filter(({ values }) => values.some((value) => value > 0));
  const axis = { type: "value", axisLabel: { color: theme("front"), formatter: (v) => figure(v) } };
  if (capacity) {
    axis.max = (range) => Math.max(range.max, capacity) * 1.02;
    axis.axisLabel.showMaxLabel = false; // no round figure, and too near to the last one
  }
  const option = {
    legend: legend(),
    grid: { left: 8, right: 28, top: 44, bottom: 8, containLabel: true },
    tooltip: {
      trigger: "axis",
      axisPointer: { type: "shadow" },
      confine: true,
      valueFormatter: (v) => (v ? figure(v) + unit : ""),
    },
    xAxis: axisStyle(axis),
    yAxis: axisStyle({
      type: "category",
      inverse: true,
      data: labels,
      axisLabel: { color: theme("front"), ...labelStyle },
    }),
    series: seen.map(({ name, values, color }, i) => ({
      name: part(name),
      itemStyle: { color },
      type: "bar",
      stack: "all",
      data: values,
      ...(capacity && i === 0 ? capacityLine({ xAxis: capacity }) : {}),
    })),
  };
  chart(id, height, option, said);
}
