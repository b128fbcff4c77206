"use strict";
// Layouts beside each other: where the time goes, what fills the memory, all figures in a table.
{
  function bars(id, plans, key, unit, said, capacity) {
    const names = Object.keys(plans[0][key]);
    const height = Math.max(170, (narrow() ? 48 : 30) * plans.length + 110);
    const labels = plans.map((plan) => plan.label);
    const parts = names.map((name) => ({
      name,
      values: plans.map((plan) => plan[key][name]),
    }));
    const labelStyle = {
      width: narrow() ? 110 : 330,
      overflow: "break",
      lineHeight: 14,
      fontSize: narrow() ? 10 : 12,
    };
    stackedBars(id, height, labels, parts, { unit, capacity, said, labelStyle });
  }

  function draw() {
    const by = $("order").value;
    const plans = [...DATA.compare].sort((a, b) => a[by] - b[by]);
    bars("times", plans, "time", " s", say("timeBars", { count: plans.length }), 0);
    bars(
      "sizes",
      plans,
      "memory",
      " GiB",
      say("memoryParts", { count: plans.length }),
      plans[0].capacity,
    );
    rows(
      $("table"),
      [say("layout"), say("seconds"), say("rate"), say("bubble"), say("memory"), say("fits")],
      plans.map((plan) => [
        plan.label,
        figure(plan.step),
        figure(plan.rate),
        figure(100 * plan.bubble, 2),
        figure(plan.total),
        { text: say(plan.fits ? "yes" : "no"), bad: !plan.fits },
      ]),
    );
  }

  $("order").onchange = draw;
  VIEWS.compare = { draw };
}
