"use strict";
// Throughput, bubble and memory as one thing at a time changes.
{
  function draw() {
    const name = $("axis").value;
    const points = DATA.trend[name];
    const word = say(name === "devices" ? "deviceCount" : name);
    const kinds = [
      ["rate", 1],
      ["bubble", 100],
      ["memory", 1],
    ];
    const height = narrow() ? 170 : 190;
    chart(
      "curves",
      kinds.length * height + 30,
      {
        tooltip: { trigger: "axis", confine: true, valueFormatter: (v) => figure(v) },
        axisPointer: { link: [{ xAxisIndex: "all" }] },
        grid: kinds.map((_, i) => ({
          left: 64,
          right: 24,
          top: 34 + i * height,
          height: height - 74,
        })),
        xAxis: kinds.map((_, i) =>
          axisStyle({
            type: "category",
            gridIndex: i,
            data: points.map((p) => String(p.x)),
            name: i === kinds.length - 1 ? word : "",
            nameLocation: "middle",
            nameGap: 26,
          }),
        ),
        yAxis: kinds.map(([kind], i) =>
          axisStyle({
            type: "value",
            gridIndex: i,
            name: say(kind),
            min: 0,
            ...(kind === "memory"
              ? { max: (range) => Math.ceil(Math.max(range.max, DATA.overview.capacity) * 1.05) }
              : {}),
            nameTextStyle: { color: theme("front"), align: "left" },
            axisLabel: { color: theme("front"), formatter: (v) => figure(v, 3), showMaxLabel: kind !== "memory" },
          }),
        ),
        series: kinds.map(([kind, scale], i) => ({
          name: say(kind),
          type: "line",
          xAxisIndex: i,
          yAxisIndex: i,
          symbolSize: 8,
          data: points.map((p) => scale * p[kind]),
          ...(kind === "memory" ? capacityLine({ yAxis: DATA.overview.capacity }) : {}),
        })),
      },
      say("curves", { axis: word }),
    );
    rows(
      $("points"),
      [word, ...kinds.map(([kind]) => say(kind))],
      points.map((p) => [
        String(p.x),
        figure(p.rate),
        figure(100 * p.bubble, 2),
        { text: figure(p.memory), bad: p.memory > DATA.overview.capacity },
      ]),
    );
  }

  $("axis").onchange = draw;
  VIEWS.trend = { draw };
}
