"use strict";
// The grid of devices, with the groups of one device lit, and memory by pipeline rank.
{
  const axes = DATA.overview.axes;
  const lit = Object.fromEntries(axes.map((axis) => [axis.name, true]));
  let chosen = null;
  let grid = null;
  let across = 1;

  function place(rank) {
    return Object.fromEntries(
      axes.map(({ name, size }) => {
        const at = rank % size;
        rank = Math.floor(rank / size);
        return [name, at];
      }),
    );
  }

  function members(rank, name) {
    // ranks that differ from it in one coordinate only
    let stride = 1;
    for (const axis of axes) {
      if (axis.name === name) {
        const first = rank - (Math.floor(rank / stride) % axis.size) * stride;
        return Array.from({ length: axis.size }, (_, i) => first + i * stride);
      }
      stride *= axis.size;
    }
    return [rank];
  }

  const LIT = ["#d4600a", "#8a2be2", "#0a8f8f", "#c2185b"]; // outlines, by axis

  const colour = (index) => PALETTE[index % PALETTE.length];

  function boxes() {
    const groups = new Map();
    if (chosen !== null) {
      axes.forEach((axis, i) => {
        if (lit[axis.name]) members(chosen, axis.name).forEach((rank) => groups.set(rank, i));
      });
      groups.set(chosen, -1);
    }
    return Array.from({ length: DATA.overview.devices }, (_, rank) => {
      const at = place(rank);
      const group = groups.get(rank);
      return {
        value: [rank % across, Math.floor(rank / across), rank],
        itemStyle: {
          color: colour(at.pp),
          opacity: chosen === null || group !== undefined ? 1 : 0.2,
          borderWidth: group === undefined ? 0 : 4,
          borderColor:
            group === undefined ? "transparent" : group < 0 ? theme("front") : LIT[group],
        },
      };
    });
  }

  function tell() {
    if (chosen === null) {
      $("device").textContent = say("pick");
      return;
    }
    const at = place(chosen);
    const groups = axes
      .filter(({ name, size }) => size > 1 && lit[name])
      .map(({ name }) => {
        const all = members(chosen, name);
        const some =
          all.slice(0, 16).join(" ") +
          (all.length > 16 ? " " + say("more", { count: all.length }) : "");
        return say("group", { axis: say(name), members: some });
      });
    $("device").textContent = say("device", {
      rank: chosen,
      node: Math.floor(chosen / DATA.overview.node_size),
      place:
        axes
          .filter(({ size }) => size > 1)
          .map(({ name }) => `${name} ${at[name]}`)
          .join(", ") || "-",
      groups: groups.join("; ") || say("alone"),
    });
  }

  function choose(rank) {
    chosen = rank;
    grid.setOption({ series: [{ data: boxes() }] });
    tell();
  }

  function drawGrid() {
    const { devices, node_size } = DATA.overview;
    const width = $("grid").clientWidth;
    const nodes = Math.max(
      1,
      Math.min(Math.ceil(devices / node_size), Math.floor(width / (node_size * 26))),
    );
    across = Math.min(node_size * nodes, devices);
    const lines = Math.ceil(devices / across);
    const digits = String(devices - 1).length;
    const side = Math.max(6, Math.min(44, Math.floor((width - 8) / across)));
    grid = chart("grid", Math.max(60, lines * Math.min(side, 38) + 8), {
      grid: { left: 2, right: 2, top: 2, bottom: 2 },
      xAxis: { type: "value", min: -0.5, max: across - 0.5, show: false },
      yAxis: { type: "value", min: -0.5, max: lines - 0.5, inverse: true, show: false },
      series: [
        {
          type: "custom",
          data: boxes(),
          large: false,
          renderItem(params, api) {
            const [x, y] = api.coord([api.value(0), api.value(1)]);
            const [w, h] = api.size([1, 1]);
            const border = node_size > 1 && api.value(2) % node_size === 0 ? 6 : 2;
            const rank = api.value(2);
            const box = {
              x: x - w / 2 + border,
              y: y - h / 2 + 2,
              width: Math.max(w - border - 2, 1),
              height: Math.max(h - 4, 1),
            };
            const children = [
              {
                type: "rect",
                shape: { ...box, r: w > 12 ? 2 : 0 },
                style: {
                  fill: api.visual("color"),
                  opacity: api.style().opacity,
                  stroke: api.style().stroke,
                  lineWidth: api.style().lineWidth,
                },
              },
            ];
            if (box.width > 7 * digits && h > 14) {
              children.push({
                type: "text",
                silent: true,
                style: {
                  text: String(rank),
                  x: box.x + box.width / 2,
                  y,
                  align: "center",
                  verticalAlign: "middle",
                  fill: api.style().opacity < 1 ? theme("faint") : "#ffffff",
                  fontSize: 11,
                },
              });
            }
            return { type: "group", children };
          },
        },
      ],
    });
    // Of very many devices a redraw takes too long to follow the pointer: a click chooses there.
    if (devices <= 4096) grid.on("mouseover", (event) => choose(event.value[2]));
    grid.on("click", (event) => choose(event.value[2]));
  }

  function drawMemory() {
    const { ranks, capacity } = DATA.overview;
    const names = Object.keys(ranks[0].parts);
    const labels = ranks.map(({ rank, layers }) => {
      const name = say("rank", { rank });
      return narrow() ? name : `${name}, ${say("layers", { count: layers })}`;
    });
    const parts = names.map((name) => ({ name, values: ranks.map((rank) => rank.parts[name]) }));
    stackedBars("memory", Math.max(170, 34 * ranks.length + 110), labels, parts, {
      unit: " GiB",
      capacity,
      said: say("memoryBars", { capacity: figure(capacity) }),
    });
  }

  $("grid").addEventListener("keydown", (event) => {
    const last = DATA.overview.devices - 1;
    const now = chosen ?? -1;
    const next = {
      ArrowRight: now + 1,
      ArrowLeft: now - 1,
      ArrowDown: now + across,
      ArrowUp: now - across,
      Home: 0,
      End: last,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(last, next)));
  });

  VIEWS.overview = {
    draw() {
      $("lit").textContent = "";
      axes
        .filter(({ size }) => size > 1)
        .forEach(({ name, size }) => {
          const button = document.createElement("button");
          button.type = "button";
          button.id = "lit-" + name;
          button.textContent = `${say(name)} ${size}`;
          button.style.borderBottom = `4px solid ${LIT[axes.findIndex((axis) => axis.name === name)]}`;
          button.setAttribute("aria-pressed", lit[name]);
          button.onclick = () => {
            lit[name] = !lit[name];
            button.setAttribute("aria-pressed", lit[name]);
            choose(chosen);
          };
          $("lit").append(button);
        });
      drawGrid();
      tell();
      drawMemory();
    },
  };
}
