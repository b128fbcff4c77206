"use strict";
// The pipeline's step, played: passes fill in as time goes on, messages travel between ranks.
{
  const flow = DATA.flow;
  const COLOURS = { F: "#9ecae9", B: "#f0a868", I: "#f9d5ad", W: "#a8d08d" };
  const times = [
    ...new Set([0, ...flow.spans.flatMap((span) => [span[1], span[2]]), flow.step]),
  ].sort((a, b) => a - b);
  let now = 0;
  let playing = 0; // the number of the animation frame that is due
  let before = 0;
  let made = null;

  function shade(code, chunk) {
    // later chunks are darker
    const share = Math.max(1 - 0.15 * chunk, 0.5);
    const hex = COLOURS[code];
    return (
      "#" +
      [1, 3, 5]
        .map((i) =>
          Math.round(parseInt(hex.slice(i, i + 2), 16) * share)
            .toString(16)
            .padStart(2, "0"),
        )
        .join("")
    );
  }

  function drawPass(params, api) {
    const [rank, start, end, , microbatch, , half] = flow.spans[params.dataIndex];
    const [x, y] = api.coord([start, rank]);
    const [w, h] = api.size([end - start, 1]);
    const top = y - 0.42 * h + (half === 2 ? 0.42 * h : 0);
    const height = half ? 0.42 * h : 0.84 * h;
    const area = params.coordSys;
    const shape = echarts.graphic.clipRectByRect(
      { x, y: top, width: Math.max(w, 0.5), height },
      { x: area.x, y: area.y, width: area.width, height: area.height },
    );
    if (!shape) return null;
    const children = [
      {
        type: "rect",
        shape,
        style: { fill: api.visual("color"), stroke: "#00000055", lineWidth: 0.5 },
      },
    ];
    if (shape.width > 9 * String(microbatch).length && height > 11) {
      children.push({
        type: "text",
        silent: true,
        style: {
          text: String(microbatch),
          x: shape.x + shape.width / 2,
          y: top + height / 2,
          align: "center",
          verticalAlign: "middle",
          fill: "#111111",
          fontSize: 10,
        },
      });
    }
    return { type: "group", children };
  }

  function drawMessage(params, api) {
    // a line from rank to rank, and where the message is now
    const [from, to, sent, used] = flow.messages[api.value(4)];
    const a = api.coord([sent, from]);
    const b = api.coord([used, to]);
    const share = Math.min(1, Math.max(0, (now - sent) / Math.max(used - sent, flow.step / 1000)));
    const stroke = theme("accent");
    const moving = now >= sent && now <= Math.max(used, sent + flow.step / 500);
    return {
      type: "group",
      children: [
        {
          type: "line",
          shape: { x1: a[0], y1: a[1], x2: b[0], y2: b[1] },
          style: { stroke, lineWidth: moving ? 2 : 0.8, opacity: moving ? 1 : 0.5 },
        },
        {
          type: "circle",
          invisible: !moving,
          shape: { cx: a[0] + (b[0] - a[0]) * share, cy: a[1] + (b[1] - a[1]) * share, r: 4.5 },
          style: { fill: stroke, stroke: theme("back"), lineWidth: 1 },
        },
      ],
    };
  }

  function travelling() {
    const least = flow.step / 500;
    return flow.messages
      .map((message, index) => [message, index])
      .filter(([[, , sent, used]]) => now >= sent && now <= Math.max(used, sent + least));
  }

  function drawClock(params, api) {
    // what is to come lies under a veil
    const [x] = api.coord([api.value(0), 0]);
    const { x: left, y, width, height } = params.coordSys;
    const at = Math.min(Math.max(x, left), left + width);
    return {
      type: "group",
      children: [
        {
          type: "rect",
          silent: true,
          shape: { x: at, y, width: left + width - at, height },
          style: { fill: theme("back"), opacity: 0.72 },
        },
        {
          type: "line",
          shape: { x1: at, y1: y, x2: at, y2: y + height },
          style: { stroke: theme("focus"), lineWidth: 2 },
        },
      ],
    };
  }

  function update(spoken) {
    const some = $("messages").checked ? flow.messages.map((m, index) => [m, index]) : travelling();
    made.setOption({
      series: [
        { id: "messages", data: some.map(([m, index]) => [m[2], m[0], m[3], m[1], index]) },
        { id: "clock", data: [[now, 0]] },
      ],
    });
    follow();
    $("clock").value = Math.round((1000 * now) / flow.step);
    $("clock").setAttribute("aria-valuetext", figure(now) + " s");
    if (spoken) tell();
  }

  function follow() {
    // the window moves on when time leaves it
    const { start, end } = made.getOption().dataZoom[0];
    const at = (100 * now) / flow.step;
    const width = end - start;
    if (at >= start && at <= end) return;
    const first = Math.max(0, Math.min(100 - width, at - width / 10));
    made.dispatchAction({ type: "dataZoom", start: first, end: first + width });
  }

  function tell() {
    const doing = Array.from({ length: flow.ranks }, (_, rank) => {
      const running = flow.spans.filter((s) => s[0] === rank && s[1] <= now && now < s[2]);
      const words = running
        .map((s) => `${say(s[3])} ${say("microbatch", { m: s[4], stage: s[7] })}`)
        .join(" + ");
      return say("onRank", { rank, doing: words || say("idle") });
    });
    const shown = doing.slice(0, 8);
    if (doing.length > 8) shown.push("…");
    shown.push(say("inFlight", { count: travelling().length }));
    $("now").textContent = say("now", {
      t: figure(now, 4),
      end: figure(flow.step, 4),
      ranks: shown.join("; "),
    });
  }

  function frame(stamp) {
    const passed = Math.min(stamp - before, 100) / 1000;
    before = stamp;
    // A whole step of two microbatches per rank takes about twelve seconds at speed 1.
    const pace = (flow.step / 12) * Math.min(1, (4 * flow.ranks) / flow.shown);
    now = Math.min(flow.step, now + passed * pace * Number($("speed").value));
    update(false);
    if (now >= flow.step) pause();
    else playing = requestAnimationFrame(frame);
  }

  function pause() {
    cancelAnimationFrame(playing);
    playing = 0;
    $("play").dataset.word = "play";
    $("play").textContent = say("play");
    update(true);
  }

  function play() {
    if (playing) return pause();
    if (now >= flow.step) now = 0;
    $("play").dataset.word = "pause";
    $("play").textContent = say("pause");
    before = performance.now();
    playing = requestAnimationFrame(frame);
  }

  function to(time) {
    now = Math.max(0, Math.min(flow.step, time));
    if (playing) pause();
    else update(true);
  }

  const gap = flow.step * 1e-9;
  const forward = () => to(times.find((time) => time > now + gap) ?? flow.step);
  const backward = () => to(times.findLast((time) => time < now - gap) ?? 0);
  $("play").onclick = play;
  $("step").onclick = forward;
  $("back").onclick = backward;
  $("restart").onclick = () => to(0);
  $("clock").oninput = (event) => to((flow.step * event.target.value) / 1000);
  $("messages").onchange = () => update(true);
  $("timeline").addEventListener("keydown", (event) => {
    const act = {
      " ": play,
      ArrowRight: forward,
      ArrowLeft: backward,
      Home: () => to(0),
      End: () => to(flow.step),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });

  VIEWS.flow = {
    leave: () => playing && pause(),
    draw() {
      const whole = flow.shown === flow.microbatches;
      $("flow-title").textContent = say(whole ? "flowTitle" : "flowPart", {
        schedule: flow.schedule,
        ranks: flow.ranks,
        shown: flow.shown,
        microbatches: flow.microbatches,
        idle: figure(100 * flow.idle, 2),
        bubble: figure(100 * DATA.compare[0].bubble, 2),
      });
      const kinds = [...new Set(flow.spans.map((span) => span[3]))];
      const perLane = flow.spans.length / flow.ranks;
      const wide = ($("timeline").clientWidth || 800) / 22;
      const step = flow.step;
      const custom = { type: "custom", clip: true, encode: { x: [0, 2], y: 1 } };
      made = chart("timeline", Math.min(640, Math.max(200, 38 * flow.ranks + 130)), {
        legend: legend({ selectedMode: false, data: kinds.map((code) => say(code)) }),
        grid: { left: 8, right: 32, top: 36, bottom: 52, containLabel: true },
        tooltip: {
          confine: true,
          formatter: (event) => {
            const span = event.data?.span;
            return span
              ? `${say(span[3])}, ${say("microbatch", { m: span[4], stage: span[7] })}<br>${figure(span[1], 4)} – ${figure(span[2], 4)} s`
              : "";
          },
        },
        dataZoom: [
          {
            type: "slider",
            height: 18,
            bottom: 8,
            start: 0,
            end: Math.min(100, (100 * wide) / perLane),
            filterMode: "none",
          },
          { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, filterMode: "none" },
        ],
        xAxis: axisStyle({
          type: "value",
          min: 0,
          max: step,
          axisLabel: {
            color: theme("front"),
            formatter: (v) => figure(v, 3) + " s",
            showMaxLabel: false,
            hideOverlap: true,
          },
        }),
        yAxis: axisStyle({
          type: "category",
          inverse: true,
          splitLine: { show: false },
          data: Array.from({ length: flow.ranks }, (_, rank) => say("rank", { rank })),
        }),
        series: [
          // One series that draws; those that follow only bring their names into the legend.
          {
            ...custom,
            id: "passes",
            renderItem: drawPass,
            data: flow.spans.map((span) => ({
              value: [span[1], span[0], span[2]],
              span,
              itemStyle: { color: shade(span[3], span[5]) },
            })),
          },
          ...kinds.map((code) => ({
            ...custom,
            name: say(code),
            renderItem: () => null,
            data: [],
            itemStyle: { color: COLOURS[code] },
          })),
          {
            ...custom,
            id: "clock",
            zlevel: 1,
            silent: true,
            renderItem: drawClock,
            data: [[now, 0]],
            encode: { x: 0, y: 1 },
          },
          { ...custom, id: "messages", zlevel: 2, silent: true, renderItem: drawMessage, data: [] },
        ],
      });
      update(true);
    },
  };
}
