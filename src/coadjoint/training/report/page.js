"use strict";
(() => {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const COLOURS = 7;
  // Dark to light with rising luminance, so that it reads the same in grey and to colour-blind eyes.
  const RAMP = ["#15143b", "#253a79", "#2a648f", "#35898f", "#62ae86", "#aecd7d", "#f5ecae"];
  // Below zero, zero and above: orange and blue differ to colour-blind eyes as well.
  const SIGNED = ["#8a3a00", "#cf6a1d", "#eeb98c", "#f3f1ec", "#9cc3e0", "#2f7fb8", "#00436f"];
  const SHAPES = [
    (r) => `M${r},0A${r},${r} 0 1 1 ${-r},0A${r},${r} 0 1 1 ${r},0Z`,
    (r) => `M${-r * 0.9},${-r * 0.9}H${r * 0.9}V${r * 0.9}H${-r * 0.9}Z`,
    (r) => `M0,${-r * 1.2}L${r * 1.1},${r * 0.8}H${-r * 1.1}Z`,
    (r) => `M0,${-r * 1.25}L${r * 1.25},0L0,${r * 1.25}L${-r * 1.25},0Z`,
    (r) => `M0,${r * 1.2}L${r * 1.1},${-r * 0.8}H${-r * 1.1}Z`,
  ];

  const svg = (name, attributes, parent, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const html = (name, style, parent, text) => {
    const node = document.createElement(name);
    if (style) node.className = style;
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const symbol = (parent, colour, x, y, r, style) =>
    svg("path", { d: SHAPES[colour % SHAPES.length](r), transform: `translate(${x},${y})`, class: `f${colour % COLOURS} ${style || ""}` }, parent);

  const show = (v, digits = 4) => {
    if (v === null || v === undefined || !Number.isFinite(v)) return "–";
    const size = Math.abs(v);
    const text = size !== 0 && (size < 1e-3 || size >= 1e7) ? v.toExponential(Math.min(2, digits - 1)).replace(/\.?0*e\+?/, "e")
      : Number.isInteger(v) ? v.toLocaleString("en-GB") : String(Number(v.toPrecision(digits)));
    return text.replaceAll("-", "−");
  };
  const duration = (s) => (s < 100 ? `${Number(s.toPrecision(3))} s` : s < 6000 ? `${Number((s / 60).toPrecision(3))} min` : `${Number((s / 3600).toPrecision(3))} h`);
  const nearest = (sorted, v) => {
    let low = 0, high = sorted.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < v) low = middle; else high = middle;
    }
    return high > 0 && Math.abs(sorted[high] - v) < Math.abs(sorted[low] - v) ? high : Math.max(0, low);
  };
  const seconds = (step) => {
    const clock = page.clock;
    if (!clock || step > clock.steps.at(-1)) return null;
    const k = clock.steps.findIndex((s) => s >= step);
    if (clock.steps[k] === step) return duration(clock.seconds[k]);
    if (k === 0) return null;
    const share = (step - clock.steps[k - 1]) / (clock.steps[k] - clock.steps[k - 1]);
    return `about ${duration(clock.seconds[k - 1] + share * (clock.seconds[k] - clock.seconds[k - 1]))}`;
  };

  // What a layer is, if the figure knows.
  const named = (figure, layer) => (figure.names && figure.names[layer] ? ` (${figure.names[layer]})` : "");

  // A text of at most `room` pixels: a longer one loses its end, and tells all of it when pointed at.
  const fitted = (node, words, room) => {
    node.textContent = words;
    if (node.getComputedTextLength() <= room) return node;
    let keep = words.length;
    do node.textContent = `${words.slice(0, --keep).trimEnd()}…`; while (keep > 1 && node.getComputedTextLength() > room);
    svg("title", {}, node, words);
    return node;
  };

  // A text around x that stays inside the figure, or null if it would come near one of the others.
  const centred = (root, box, x, y, style, words, others = []) => {
    const node = svg("text", { class: style, x, y, "text-anchor": "middle" }, root, words), half = node.getComputedTextLength() / 2;
    const at = Math.min(Math.max(x, half), box.width - half);
    node.setAttribute("x", at);
    if (!others.some(([from, to]) => at + half + 16 > from && at - half - 16 < to)) return [at - half, at + half];
    node.remove();
    return null;
  };

  // A scale takes values to pixels; its ticks are round numbers.
  const linear = (low, high, from, to, wanted) => {
    if (!(high > low)) { const room = Math.abs(low) * 0.05 || 0.5; low -= room; high += room; }
    const rough = (high - low) / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(Number((k * step).toPrecision(12)));
    return { at: (v) => from + ((v - low) / (high - low)) * (to - from), back: (p) => low + ((p - from) / (to - from)) * (high - low), ticks, low, high };
  };
  const logarithmic = (low, high, from, to, wanted) => {
    const inner = linear(Math.log10(low), Math.log10(high), from, to, wanted);
    const first = Math.ceil(inner.low - 1e-9), last = Math.floor(inner.high + 1e-9);
    const every = Math.max(1, Math.ceil((last - first + 1) / Math.max(2, wanted)));
    let ticks = [];
    for (let k = first; k <= last; k += every) ticks.push(10 ** k);
    if (ticks.length < 3) ticks = Array.from({ length: last - first + 3 }, (_, k) => first - 1 + k)
      .flatMap((k) => (ticks.length < 2 ? [1, 2, 3, 5, 7] : [1, 2, 5]).map((m) => m * 10 ** k))
      .filter((v) => Math.log10(v) >= inner.low && Math.log10(v) <= inner.high);
    if (ticks.length < 2) ticks = inner.ticks.map((v) => 10 ** v);
    return { at: (v) => inner.at(Math.log10(v)), back: (p) => 10 ** inner.back(p), ticks, low, high };
  };
  const tickText = (v, log) => {
    const power = Math.round(Math.log10(Math.abs(v)));
    if (log && (power < -2 || power > 3) && Math.abs(v / 10 ** power - 1) < 1e-6) return "10" + String(power).replace(/./g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)]));
    return show(v, log ? 2 : 4);
  };

  // Axes count steps and moments, so their marks are whole numbers; labels stand upright above and below the plot, for phones too.
  const axes = (root, box, x, y, xLabel, yLabel, log, whole = true, name = show) => {
    for (const v of y.ticks) {
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y.at(v), y2: y.at(v) }, root);
      svg("text", { x: box.left - 8, y: y.at(v) + 4, "text-anchor": "end" }, root, tickText(v, log));
    }
    svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, root);
    below(root, box, x, xLabel, whole, box.right, name);
    fitted(svg("text", { class: "label", x: 0, y: 12 }, root), yLabel, box.right);
  };
  const below = (root, box, x, label, whole = true, end = box.right, name = show) => {
    let free = -Infinity;
    for (const v of whole ? x.ticks.filter(Number.isInteger) : x.ticks) {
      const text = name(v), half = text.length * 3.4, at = Math.min(Math.max(x.at(v), half), box.width - half);
      svg("line", { class: "axis", x1: x.at(v), x2: x.at(v), y1: box.bottom, y2: box.bottom + 5 }, root);
      if (at - half < free + 8) continue;
      free = at + half;
      svg("text", { x: at, y: box.bottom + 19, "text-anchor": "middle" }, root, text);
    }
    fitted(svg("text", { class: "label", x: end, y: box.bottom + 38, "text-anchor": "end" }, root), label, end);
  };
  const room = (texts) => Math.ceil(Math.max(...texts.map((t) => t.length)) * 6.9) + 12;

  // Every drawing answers: find(x, y) -> place, move(place, dx, dy) -> place, tell(place) -> what to show there.
  const lines = (figure, root, box, hidden) => {
    const seen = figure.series.filter((s) => !hidden.has(figure.rows ? s.colour : s.name));
    const ys = (seen.length ? seen : figure.series).flatMap((s) => s.y).filter((v) => v !== null);
    const xs = figure.series.flatMap((s) => s.x);
    for (const rule of figure.rules || []) if (!figure.y.log || rule.y > 0) ys.push(rule.y);
    for (const band of figure.bands || []) ys.push(...band.low, ...band.high);
    let low = ys.reduce((a, b) => Math.min(a, b)), high = ys.reduce((a, b) => Math.max(a, b));
    if (figure.y.range) { low = Math.min(low, figure.y.range[0]); high = Math.max(high, figure.y.range[1]); }
    if (figure.y.log) { const pad = (high / low) ** 0.05 * 1.02; low /= pad; high *= pad; }
    else if (!figure.y.range) { const pad = (high - low) * 0.05; low -= pad; high += pad; }
    const make = figure.y.log ? logarithmic : linear;
    box.top = 30;
    const wanted = Math.round((box.bottom - box.top) / 42);
    const y = make(low, high, box.bottom, box.top, wanted);
    box.left = room(y.ticks.map((v) => tickText(v, figure.y.log)));
    const last = xs.reduce((a, b) => Math.max(a, b)), first = xs.reduce((a, b) => Math.min(a, b));
    const x = linear(!figure.stamps && first > 0 && first < last / 20 ? 0 : first, last, box.left + 2, box.right - 2, (box.right - box.left) / 85);
    // Rows of a series may have times: they stand in the place of the numbers.
    const stamp = (v) => (figure.stamps && figure.stamps[v - figure.stamps_from]) || show(v, 6);
    axes(root, box, x, y, figure.x, figure.y.label, figure.y.log, true, stamp);
    const many = seen.length > 8;
    for (const band of figure.bands || []) {
      const edge = (side) => band.x.map((v, k) => `${x.at(v).toFixed(1)},${y.at(side[k]).toFixed(1)}`);
      svg("polygon", { class: `band f${band.colour}`, points: [...edge(band.low), ...edge(band.high).reverse()].join(" ") }, root);
    }
    // Stairs often coincide: those below are wider, so that a border of each shows beside those above.
    const wider = Math.min(2.4, 10 / Math.max(1, seen.length - 1));
    for (const [order, s] of seen.entries()) {
      let path = "", pen = false, alone = [];
      s.y.forEach((v, k) => {
        if (v === null) { pen = false; return; }
        const px = x.at(s.x[k]).toFixed(1), py = y.at(v).toFixed(1);
        path += !pen ? `M${px},${py}` : figure.stairs ? `H${px}V${py}` : `L${px},${py}`;
        if (!pen && (k + 1 === s.y.length || s.y[k + 1] === null)) alone.push([px, py]);
        pen = true;
      });
      const trace = svg("path", { d: path, class: `trace s${s.colour % COLOURS}${s.faint ? " faint" : ""}${many ? " many" : ""}${s.colour >= COLOURS ? " dashed" : ""}` }, root);
      if (figure.stairs) { trace.style.strokeWidth = 1.9 + wider * (seen.length - 1 - order); trace.style.strokeLinecap = "butt"; }
      for (const [px, py] of alone) symbol(root, s.colour, px, py, s.faint ? 2 : 3);
      if (!many && !figure.stairs && s.x.length <= 40) s.y.forEach((v, k) => v !== null && symbol(root, s.colour, x.at(s.x[k]), y.at(v), 2.6));
    }
    for (const rule of figure.rules || []) {
      if (figure.y.log && rule.y <= 0) continue;
      const at = y.at(rule.y);
      svg("line", { class: "ruled", x1: box.left, x2: box.right, y1: at, y2: at }, root);
      const label = fitted(svg("text", { class: "rule" }, root), rule.label, box.right - box.left - 14), wide = label.getComputedTextLength() + 8;
      // The place along the line where the label hides the least of the curves: the first one if all are alike, the corners before others.
      const leftmost = box.left + 6, rightmost = box.right - wide;
      const places = [0, 1, 0.25, 0.5, 0.75].map((share) => leftmost + share * (rightmost - leftmost));
      const spots = places.flatMap((px) => [at - 7, at + 16].map((py) => [px, py])).filter(([, py]) => py > box.top + 8 && py < box.bottom - 2);
      const covered = ([px, py]) => seen.reduce((n, s) => n + s.y.filter((v, k) => {
        const from = s.y[k - 1] ?? v, left = x.at(s.x[k - 1] ?? s.x[k]), [top, low] = [y.at(v), y.at(from)].sort((a, b) => a - b);
        return v !== null && x.at(s.x[k]) > px - 6 && left < px + wide && low > py - 14 && top < py + 6;
      }).length, 0);
      const [px, py] = spots.reduce((best, spot) => (covered(spot) < covered(best) ? spot : best));
      label.setAttribute("x", px);
      label.setAttribute("y", py);
      // Where curves are everywhere, a ground keeps them from crossing the words.
      if (covered([px, py])) label.before(svg("rect", { class: "ground", x: px - 4, y: py - 12, width: wide, height: 16 }));
    }
    for (const [k, mark] of (figure.marks || []).entries()) {
      const at = x.at(mark.x);
      if (at < box.left - 1 || at > box.right + 1) continue;
      svg("line", { class: "mark", x1: at, x2: at, y1: box.top - 6, y2: box.bottom }, root);
      const end = at > (box.left + box.right) / 2;
      svg("text", { class: "rule", x: at + (end ? -5 : 5), y: box.top - 5 + 13 * k, "text-anchor": end ? "end" : "start" }, root, mark.label);
    }
    if (!seen.length) return null;
    const head = (step) => {
      const when = figure.clock ? seconds(step) : null;
      return figure.stamps ? stamp(step) : `${figure.x.replace("training ", "")} ${show(step, 6)}${named(figure, step)}${when ? ` · ${when}` : ""}`;
    };
    if (many && figure.rows) {
      const points = seen.flatMap((s) => s.x.map((step, k) => ({ s, step, v: s.y[k], px: x.at(step), py: s.y[k] === null ? NaN : y.at(s.y[k]) }))).filter((p) => p.v !== null);
      return {
        first: 0,
        find: (px, py) => points.reduce((best, p, k) => (Math.hypot(p.px - px, p.py - py) < Math.hypot(points[best].px - px, points[best].py - py) ? k : best), 0),
        move: (k, dx, dy) => Math.min(points.length - 1, Math.max(0, k + dx - dy)),
        tell: (k) => {
          const p = points[k];
          return { x: p.px, y: p.py, head: head(p.step), lines: [[p.s.colour, p.s.name, show(p.v)]], dots: [[p.s.colour, p.px, p.py]] };
        },
      };
    }
    const stops = [...new Set(seen.flatMap((s) => s.x))].sort((a, b) => a - b);
    // A curve answers for a step that it holds, or one between two of its points.
    const value = (s, step) => {
      if (step < s.x[0] || step > s.x.at(-1)) return null;
      let k = nearest(s.x, step);
      if (figure.stairs) for (k = 0; k + 1 < s.x.length && s.x[k + 1] <= step; k++);
      return k;
    };
    return {
      first: stops.length - 1,
      find: (px) => nearest(stops, x.back(px)),
      move: (k, dx) => Math.min(stops.length - 1, Math.max(0, k + dx)),
      tell: (k) => {
        const step = stops[k], told = [], dots = [];
        for (const s of seen) {
          const at = value(s, step);
          if (at === null) continue;
          const elsewhere = !figure.stairs && s.x[at] !== step ? ` at ${show(s.x[at])}` : "";
          told.push([s.colour, s.name + elsewhere, s.y[at] === null ? "not finite" : show(s.y[at])]);
          if (s.y[at] !== null) dots.push([s.colour, figure.stairs ? x.at(step) : x.at(s.x[at]), y.at(s.y[at])]);
        }
        return { x: x.at(step), line: [box.top, box.bottom], head: head(step), lines: told.slice(0, 12), dots };
      },
    };
  };

  const extent = (values) => [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  const padded = ([low, high]) => { const pad = (high - low || Math.abs(low) || 1) * 0.04; return [low - pad, high + pad]; };
  const visible = (figure, hidden) => { const seen = figure.series.filter((s) => !hidden.has(s.name)); return seen.length ? seen : figure.series; };

  // Points: predictions over targets, with a diagonal where they agree; or residuals, with rules.
  const scatter = (figure, root, box, hidden) => {
    const seen = visible(figure, hidden), xs = seen.flatMap((s) => s.x), ys = seen.flatMap((s) => s.y);
    for (const rule of figure.rules || []) ys.push(rule.y);
    const both = padded(extent([...xs, ...ys])), [left, right] = figure.diagonal ? both : padded(extent(xs)), [low, high] = figure.diagonal ? both : padded(extent(ys));
    box.top = 30;
    const y = linear(low, high, box.bottom, box.top, Math.round((box.bottom - box.top) / 42));
    box.left = room(y.ticks.map((v) => show(v)));
    const x = linear(left, right, box.left + 2, box.right - 2, (box.right - box.left) / 85);
    axes(root, box, x, y, figure.x, figure.y.label, false, false);
    if (figure.diagonal) svg("line", { class: "ruled", x1: x.at(left), y1: y.at(left), x2: x.at(right), y2: y.at(right) }, root);
    for (const rule of figure.rules || []) svg("line", { class: "ruled", x1: box.left, x2: box.right, y1: y.at(rule.y), y2: y.at(rule.y) }, root);
    const points = seen.flatMap((s) => s.x.map((v, k) => ({ s, k, px: x.at(v), py: y.at(s.y[k]) })));
    const r = points.length > 400 ? 2.2 : 3.2;
    for (const p of points) symbol(root, p.s.colour, p.px.toFixed(1), p.py.toFixed(1), r, "point");
    const order = points.map((_, k) => k).sort((a, b) => points[a].px - points[b].px || points[a].py - points[b].py);
    return {
      first: 0,
      find: (px, py) => order.reduce((best, k, n) => (Math.hypot(points[k].px - px, points[k].py - py) < Math.hypot(points[order[best]].px - px, points[order[best]].py - py) ? n : best), 0),
      move: (n, dx, dy) => Math.min(order.length - 1, Math.max(0, n + dx - dy)),
      tell: (n) => {
        const p = points[order[n]], name = p.s.names[p.k];
        return { x: p.px, y: p.py, head: name ? `${name} (${p.s.name})` : p.s.name, lines: [[p.s.colour, figure.x, show(p.s.x[p.k])], [null, figure.y.label, show(p.s.y[p.k])]], dots: [[p.s.colour, p.px, p.py]] };
      },
    };
  };

  // Bars of a histogram, those of several sets side by side.
  const bars = (figure, root, box, hidden) => {
    const seen = visible(figure, hidden), edges = figure.edges, [, high] = extent(seen.flatMap((s) => s.y));
    box.top = 30;
    const y = linear(0, high * 1.05 || 1, box.bottom, box.top, Math.round((box.bottom - box.top) / 42));
    box.left = room(y.ticks.map((v) => show(v)));
    const x = linear(...padded([edges[0], edges.at(-1)]), box.left + 2, box.right - 2, (box.right - box.left) / 85);
    axes(root, box, x, y, figure.x, figure.y.label, false, false);
    if (edges[0] < 0 && edges.at(-1) > 0) svg("line", { class: "ruled", x1: x.at(0), x2: x.at(0), y1: box.top, y2: box.bottom }, root);
    for (const [n, s] of seen.entries()) s.y.forEach((v, k) => {
      const wide = (x.at(edges[k + 1]) - x.at(edges[k]) - 2) / seen.length;
      if (v > 0) svg("rect", { class: `bar f${s.colour % COLOURS}`, x: x.at(edges[k]) + 1 + n * wide, y: y.at(v), width: Math.max(0.5, wide), height: box.bottom - y.at(v) }, root);
    });
    const last = edges.length - 2;
    return {
      first: 0,
      find: (px) => Math.min(last, Math.max(0, edges.findIndex((e) => e > x.back(px)) - 1 + (x.back(px) >= edges.at(-1) ? last + 2 : 0))),
      move: (k, dx) => Math.min(last, Math.max(0, k + dx)),
      tell: (k) => ({
        x: (x.at(edges[k]) + x.at(edges[k + 1])) / 2, frame: [x.at(edges[k]), box.top, x.at(edges[k + 1]) - x.at(edges[k]), box.bottom - box.top],
        head: `${show(edges[k], 3)} to ${show(edges[k + 1], 3)}`, lines: seen.map((s) => [s.colour, s.name, `${show(s.counts[k])} (${show(100 * s.y[k], 2)}%)`]),
      }),
    };
  };

  // Named bars, the first on top.
  const ranks = (figure, root, box) => {
    const { names, values } = figure;
    box.top = 24; box.left = Math.min(box.width * 0.42, room(names));
    const x = linear(0, Math.max(...values) * 1.02 || 1, box.left, box.right - 2, (box.right - box.left) / 85), tall = (box.bottom - box.top) / names.length;
    const top = (k) => box.top + k * tall;
    for (const v of x.ticks) svg("line", { class: "grid", x1: x.at(v), x2: x.at(v), y1: box.top, y2: box.bottom }, root);
    below(root, box, x, figure.x, false);
    svg("line", { class: "axis", x1: box.left, x2: box.left, y1: box.top, y2: box.bottom }, root);
    names.forEach((name, k) => {
      fitted(svg("text", { x: box.left - 8, y: top(k) + tall / 2 + 4, "text-anchor": "end" }, root), name, box.left - 8);
      svg("rect", { class: "bar f0", x: box.left, y: top(k) + tall * 0.15, width: Math.max(0, x.at(values[k]) - box.left), height: tall * 0.7 }, root);
    });
    const inside = (k) => Math.min(names.length - 1, Math.max(0, k));
    return {
      first: 0,
      find: (_, py) => inside(Math.floor((py - box.top) / tall)),
      move: (k, dx, dy) => inside(k + dx + dy),
      tell: (k) => ({ x: x.at(values[k]), y: top(k) + tall / 2, frame: [box.left, top(k), box.right - box.left, tall], head: names[k], lines: [[0, figure.x, show(values[k])]] }),
    };
  };

  // One line per trial across the axes of its settings, the best on top and dark.
  const parallel = (figure, root, box) => {
    const { axes: scales, trials } = figure, last = scales.length - 1, gap = (box.width - 2 * 26) / Math.max(1, last);
    box.top = 66; box.left = 26; box.right = box.width - 26; box.bottom += 6;
    const x = (k) => box.left + k * gap, y = (share) => box.bottom - share * (box.bottom - box.top);
    const dot = (n, k) => (scales[k].places[n] === null ? null : [x(k), y(scales[k].places[n])]);
    const path = (n) => {
      let text = "", pen = false;
      scales.forEach((_, k) => {
        const at = dot(n, k);
        if (!at) return; // a setting that the trial does not have: the line passes by
        text += `${pen ? "L" : "M"}${at[0].toFixed(1)},${at[1].toFixed(1)}`;
        pen = true;
      });
      return text;
    };
    for (let n = trials.length - 1; n >= 0; n--) {
      const share = trials.length > 1 ? n / (trials.length - 1) : 0;
      svg("path", { d: path(n), class: "trace s0", "stroke-opacity": n === 0 ? 1 : 0.75 - 0.6 * share, "stroke-width": n === 0 ? 3 : 1.4 }, root);
    }
    scales.forEach((scale, k) => {
      const end = k === 0 ? "start" : k === last ? "end" : "middle", at = k === 0 ? 2 : k === last ? box.width - 2 : x(k);
      svg("line", { class: "axis", x1: x(k), x2: x(k), y1: box.top, y2: box.bottom }, root);
      // Neighbours take turns in two rows, so that words have room on a phone.
      const low = k % 2 === 0, room = k === 0 || k === last ? gap * 1.4 : gap * 1.9;
      fitted(svg("text", { class: "label", x: at, y: low ? 28 : 12, "text-anchor": end }, root), scale.name, room);
      for (const [place, label] of scale.marks) {
        const outside = scale.marks.length > 1 && (place === 0 || place === 1);
        const py = !outside ? y(place) - 5 : place === 1 ? box.top - (low ? 7 : 21) : box.bottom + (low ? 16 : 31);
        fitted(svg("text", { class: outside ? "" : "rule", x: at, y: py, "text-anchor": end }, root), label, outside ? room : gap - 4);
      }
    });
    const inside = (n) => Math.min(trials.length - 1, Math.max(0, n));
    return {
      first: 0,
      find: (px, py) => {
        const k = Math.min(last, Math.max(0, Math.round((px - box.left) / gap)));
        let best = 0, least = Infinity;
        trials.forEach((_, n) => { const at = dot(n, k); if (at && Math.abs(at[1] - py) < least) { least = Math.abs(at[1] - py); best = n; } });
        return best;
      },
      move: (n, dx, dy) => inside(n + dx + dy),
      tell: (n) => {
        const dots = scales.map((_, k) => dot(n, k)).filter((at) => at).map(([px, py]) => [0, px, py]);
        return { x: dots.at(-1)[1], y: dots.at(-1)[2], dots, head: trials[n].head, lines: trials[n].lines.map(([name, value]) => [null, name, value]) };
      },
    };
  };

  const rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
  const shade = (share, ramp = RAMP) => {
    const at = Math.min(0.999999, Math.max(0, share)) * (ramp.length - 1), k = Math.floor(at), a = rgb(ramp[k]), b = rgb(ramp[k + 1]);
    return a.map((v, i) => Math.round(v + (b[i] - v) * (at - k)));
  };
  const picture = (width, height, colour) => {
    const canvas = document.createElement("canvas");
    canvas.width = width; canvas.height = height;
    const context = canvas.getContext("2d"), image = context.createImageData(width, height);
    for (let j = 0; j < height; j++) for (let i = 0; i < width; i++) {
      const c = colour(i, j);
      if (c) image.data.set([...c, 255], 4 * (j * width + i));
    }
    context.putImageData(image, 0, 0);
    return canvas.toDataURL();
  };

  const heat = (figure, root, box) => {
    const { t, steps, cells, bands } = figure, ramp = figure.signed ? SIGNED : RAMP; // bands: names of the rows
    let [low, high] = figure.span;
    if (!(high > low)) { low -= 0.5; high += 0.5; }
    const flat = cells.flat().filter((v) => v !== null), under = flat.some((v) => v < low), over = flat.some((v) => v > high);
    // A cell reaches half way to its neighbours: probes need not be evenly spaced.
    const edges = (v) => v.length === 1 ? [v[0] - 0.5, v[0] + 0.5]
      : [v[0] - (v[1] - v[0]) / 2, ...v.slice(1).map((b, k) => (v[k] + b) / 2), v.at(-1) + (v.at(-1) - v.at(-2)) / 2];
    const ex = edges(t), ey = edges(steps);
    const counted = !figure.x; // steps and moments, or what its labels say
    if (counted && !bands && steps.length > 1) { ey[0] = steps[0]; ey[steps.length] = figure.last ?? steps.at(-1); } // there is no step beyond
    box.top = 66;
    const wanted = Math.round((box.bottom - box.top) / 42);
    const y = linear(ey[0], ey.at(-1), box.bottom, box.top, wanted);
    box.left = Math.min(box.width * 0.4, room(bands || y.ticks.map((v) => show(v))));
    if (figure.square) box.right = Math.min(box.right, Math.max(box.left + 200, box.left + ((box.bottom - box.top) * t.length) / steps.length));
    const x = linear(ex[0], ex.at(-1), box.left, box.right, (box.right - box.left) / 70);
    svg("rect", { class: "blank", x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top }, root);
    const width = Math.min(1200, Math.round(box.right - box.left) * 2), height = Math.round(box.bottom - box.top) * 2;
    const columns = Array.from({ length: width }, (_, i) => nearest(t, ex[0] + ((i + 0.5) / width) * (ex.at(-1) - ex[0])));
    const rows = Array.from({ length: height }, (_, j) => nearest(steps, ey.at(-1) - ((j + 0.5) / height) * (ey.at(-1) - ey[0])));
    const colours = cells.map((row) => row.map((v) => (v === null ? null : shade((v - low) / (high - low), ramp))));
    const image = (attributes, href) => svg("image", { preserveAspectRatio: "none", href, ...attributes }, root);
    image({ x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top }, picture(width, height, (i, j) => colours[rows[j]][columns[i]]));
    const every = bands ? Math.ceil((14 * bands.length) / (box.bottom - box.top)) : 1;
    if (bands) for (let j = bands.length - 1; j >= 0; j -= every) fitted(svg("text", { x: box.left - 8, y: y.at(steps[j]) + 4, "text-anchor": "end" }, root), bands[j], box.left - 8);
    else for (const v of counted ? y.ticks.filter(Number.isInteger) : y.ticks) svg("text", { x: box.left - 8, y: y.at(v) + 4, "text-anchor": "end" }, root, show(v));
    below(root, box, x, figure.x || figure.axis || "time t in the sequence", counted);
    svg("text", { class: "label", x: 0, y: box.top - 10 }, root, figure.y || "training step");
    const from = Math.max(box.left, box.right - 240), scale = linear(low, high, from, box.right, 3);
    image({ x: from, y: 18, width: box.right - from, height: 10 }, picture(200, 1, (i) => shade(i / 199, ramp)));
    svg("text", { class: "label", x: box.right, y: 12, "text-anchor": "end" }, root, figure.label);
    const near = (v) => (Math.abs(v) < (high - low) * 5e-4 ? 0 : v); // 1.6e-5 beside -8.5 is nothing
    const ends = [[low, from, "start", under ? "≤ " : ""], [high, box.right, "end", over ? "≥ " : ""]];
    const taken = ends.map(([v, at, anchor, sign]) => {
      const wide = svg("text", { x: at, y: 42, "text-anchor": anchor }, root, sign + show(near(v), 3)).getComputedTextLength();
      return anchor === "end" ? [at - wide, at] : [at, at + wide];
    });
    for (const v of scale.ticks) {
      const place = centred(root, box, scale.at(v), 42, "", show(v, 3), taken);
      if (place) taken.push(place);
    }
    const columnsOf = t.length;
    return {
      first: (steps.length - 1) * columnsOf,
      find: (px, py) => nearest(steps, y.back(py)) * columnsOf + nearest(t, x.back(px)),
      move: (k, dx, dy) => {
        const i = Math.min(columnsOf - 1, Math.max(0, (k % columnsOf) + dx)), j = Math.min(steps.length - 1, Math.max(0, Math.floor(k / columnsOf) - dy));
        return j * columnsOf + i;
      },
      tell: (k) => {
        const i = k % columnsOf, j = Math.floor(k / columnsOf), v = cells[j][i], when = seconds(steps[j]);
        return {
          x: (x.at(ex[i]) + x.at(ex[i + 1])) / 2, y: (y.at(ey[j]) + y.at(ey[j + 1])) / 2,
          frame: [x.at(ex[i]), y.at(ey[j + 1]), x.at(ex[i + 1]) - x.at(ex[i]), y.at(ey[j]) - y.at(ey[j + 1])],
          head: counted ? `step ${show(steps[j])}${when ? ` · ${when}` : ""} · ${figure.axis || "t ="} ${show(t[i])}${named(figure, t[i])}` : bands ? `${bands[j]} · ${figure.x} ${show(t[i])}` : `(${show(t[i])}, ${show(steps[j])})`, lines: [[null, figure.label, v === null ? figure.blank || "zero or not finite" : show(v)]],
        };
      },
    };
  };

  const dots = (figure, root, box) => {
    const values = figure.points.map((p) => p.x).filter((v) => v !== null);
    const misses = figure.points.some((p) => p.x === null), lane = misses ? Math.min(110, box.width * 0.24) : 0;
    for (const rule of figure.rules || []) values.push(rule.x);
    box.left = 4; box.top = figure.rules ? 22 : 6;
    let low = values.length ? Math.min(...values) : 0, high = values.length ? Math.max(...values) : 1;
    if (!figure.rules) low = Math.min(0, low);
    const pad = (high - low) * 0.03;
    const x = linear(figure.rules ? low - pad : low, high + pad, box.left + 6, box.right - lane - 6, (box.right - lane) / 85);
    const tall = (box.bottom - box.top) / figure.rows.length, places = [];
    // Without a value there is no scale, so no grid either.
    for (const v of values.length ? x.ticks : []) svg("line", { class: "grid", x1: x.at(v), x2: x.at(v), y1: box.top, y2: box.bottom }, root);
    for (const rule of figure.rules || []) {
      svg("line", { class: "ruled", x1: x.at(rule.x), x2: x.at(rule.x), y1: box.top, y2: box.bottom }, root);
      centred(root, box, x.at(rule.x), box.top - 8, "rule", rule.label);
    }
    if (misses) {
      svg("line", { class: "axis", x1: box.right - lane, x2: box.right - lane, y1: box.top, y2: box.bottom }, root);
      svg("text", { x: box.right - lane / 2, y: box.bottom + 19, "text-anchor": "middle" }, root, figure.lane);
    }
    figure.rows.forEach((name, row) => {
      const top = box.top + row * tall, middle = top + 22 + (tall - 28) / 2;
      if (row) svg("line", { class: "axis", x1: 0, x2: box.right, y1: top, y2: top }, root);
      const most = Math.floor((box.right - lane - 10) / 7);
      svg("text", { class: "row", x: 4, y: top + 17 }, root, name.length > most ? `${name.slice(0, most - 1)}…` : name);
      const here = figure.points.filter((p) => p.row === row), lost = here.filter((p) => p.x === null), across = Math.max(1, Math.floor((lane - 16) / 13)), piles = [];
      for (const p of here.filter((q) => q.x !== null).sort((a, b) => a.x - b.x)) {
        const pile = piles.at(-1);
        if (pile && x.at(p.x) - x.at(pile[0].x) < 10) pile.push(p); else piles.push([p]);
      }
      here.forEach((p) => {
        let px, py = middle;
        if (p.x === null) {
          const k = lost.indexOf(p), inRow = Math.min(across, lost.length - Math.floor(k / across) * across), layers = Math.ceil(lost.length / across);
          px = box.right - lane / 2 + ((k % across) - (inRow - 1) / 2) * 13;
          py = top + tall / 2 + (Math.floor(k / across) - (layers - 1) / 2) * Math.min(13, (tall - 10) / layers);
        } else {
          // Dots that would cover each other stand in a column.
          const pile = piles.find((one) => one.includes(p)), k = pile.indexOf(p);
          px = x.at(p.x);
          py = middle + (k - (pile.length - 1) / 2) * Math.min(11, (tall - 40) / Math.max(1, pile.length - 1));
        }
        symbol(root, row, px, py, 4.6, `dot s${row % COLOURS}${p.open ? " open" : ""}`);
        places.push({ p, px, py, row, name });
      });
    });
    svg("line", { class: "axis", x1: 0, x2: box.right, y1: box.bottom, y2: box.bottom }, root);
    if (values.length) below(root, box, x, figure.x, !figure.rules && high > 2, box.right - lane);
    const near = (px, py) => places.reduce((best, d, k) => (Math.hypot(d.px - px, d.py - py) < Math.hypot(places[best].px - px, places[best].py - py) ? k : best), 0);
    return {
      first: 0, find: near,
      move: (k, dx, dy) => Math.min(places.length - 1, Math.max(0, k + dx + dy)),
      tell: (k) => {
        const d = places[k];
        return { x: d.px, y: d.py, head: d.name, lines: [[d.row, d.p.label, d.p.x === null ? figure.lane : show(d.p.x)]], frame: [d.px - 8, d.py - 8, 16, 16] };
      },
    };
  };

  // Pictures stand in lines of as many samples as fit; each line has a row for every kind of picture.
  const GAP = 8, LABEL = 20;
  const spread = (figure, width) => {
    const count = figure.rows[0].images.length, [, high, wide] = figure.size, shape = high / wide;
    const lines = Math.ceil(count / Math.max(1, Math.floor((width + GAP) / (64 + GAP)))), across = Math.ceil(count / lines); // even lines
    const side = Math.min(112, (width - 2) / across - GAP), row = LABEL + side * shape + GAP, below = figure.captions.length ? 40 : 6;
    return { count, across, side, tall: side * shape, row, line: figure.rows.length * row + below, lines };
  };
  const pictures = (figure, root, box) => {
    const [channels, high, wide] = figure.size, [low, top] = figure.range, plane = high * wide;
    const at = spread(figure, box.width), left = (k) => 1 + (k % at.across) * (at.side + GAP), upper = (r, k) => Math.floor(k / at.across) * at.line + r * at.row + LABEL;
    const grey = (image, place) => (channels === 1 ? [image[place], image[place], image[place]] : [0, 1, 2].map((c) => image[place + c * plane]));
    const most = Math.max(2, Math.floor(at.side / 7)), cut = (text) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
    figure.rows.forEach((row, r) => row.images.forEach((image, k) => {
      const href = picture(wide, high, (i, j) => grey(image, j * wide + i));
      if (k % at.across === 0) svg("text", { class: "label", x: 0, y: upper(r, k) - 6 }, root, row.label);
      svg("image", { class: "pixels", href, x: left(k), y: upper(r, k), width: at.side, height: at.tall, preserveAspectRatio: "none" }, root);
      svg("rect", { class: "edge", x: left(k) - 0.5, y: upper(r, k) - 0.5, width: at.side + 1, height: at.tall + 1 }, root);
    }));
    figure.captions.forEach((caption, k) => {
      const y = upper(figure.rows.length - 1, k) + at.tall, mark = caption.right === null ? "" : caption.right ? " ✓" : " ✗";
      svg("text", { class: "row", x: left(k), y: y + 17 }, root, cut(caption.target));
      svg("text", { class: caption.right === false ? "wrong" : "row", x: left(k), y: y + 33 }, root, cut(caption.prediction + mark));
    });
    const value = (image, place) => grey(image, place).slice(0, channels).map((v) => show(low + (v / 255) * (top - low), 2)).join(", ");
    const inside = (v, most) => Math.min(most - 1, Math.max(0, Math.floor(v)));
    // A place is a pixel of a sample: of all pictures in its column.
    return {
      first: 0,
      find: (px, py) => {
        const line = inside(py / at.line, at.lines), column = inside(px / (at.side + GAP), at.across), k = Math.min(at.count - 1, line * at.across + column);
        const r = inside((py - line * at.line) / at.row, figure.rows.length);
        return (k * high + inside(((py - upper(r, k)) / at.tall) * high, high)) * wide + inside(((px - left(k)) / at.side) * wide, wide);
      },
      move: (place, dx, dy) => {
        const k = Math.floor(place / plane), j = Math.floor((place % plane) / wide), i = place % wide, across = k * wide + i + Math.sign(dx) * Math.min(Math.abs(dx), at.count * wide);
        const next = Math.min(at.count * wide - 1, Math.max(0, across));
        return (Math.floor(next / wide) * high + Math.min(high - 1, Math.max(0, j + dy))) * wide + (next % wide);
      },
      tell: (place) => {
        const k = Math.floor(place / plane), pixel = place % plane, j = Math.floor(pixel / wide), i = pixel % wide, caption = figure.captions[k];
        const width = at.side / wide, tall = at.tall / high, words = caption ? ` · target ${caption.target}, prediction ${caption.prediction}` : "";
        return {
          x: left(k) + (i + 0.5) * width, y: upper(0, k) + j * tall, head: `sample ${k} · row ${j}, column ${i}${words}`,
          frame: [left(k) + i * width, upper(0, k) + j * tall, width, tall], lines: figure.rows.map((row) => [null, row.label, value(row.images[k], pixel)]),
        };
      },
    };
  };

  const KINDS = { lines, heat, dots, pictures, scatter, bars, ranks, parallel };
  const height = (figure, width) => {
    if (figure.kind === "pictures") return Math.ceil(spread(figure, width).line * spread(figure, width).lines);
    if (figure.kind === "ranks") return 24 + 44 + Math.max(60, figure.names.length * 26);
    if (figure.bands && !figure.square) return Math.min(460, 66 + 44 + Math.max(70, figure.bands.length * 24));
    if (figure.kind === "scatter") return Math.round(Math.min(400, Math.max(280, width * 0.7)));
    if (figure.kind === "dots") return 54 + Math.max(figure.rows.length * (figure.rows.length > 2 * COLOURS ? 50 : 84), 90) + (figure.rules ? 16 : 0);
    return Math.round(Math.min(figure.kind === "heat" ? 400 : 320, Math.max(figure.kind === "heat" ? 330 : 250, width * 0.56)));
  };

  const legend = (node, figure, hidden, again) => {
    const entries = figure.rows ? figure.rows.map((name, colour) => ({ name, colour, key: colour })).filter((e) => figure.series.some((s) => s.colour === e.colour))
      : figure.series.map((s) => ({ name: s.name, colour: s.colour, faint: s.faint, key: s.name }));
    if (entries.length < 2) return;
    for (const entry of entries) {
      const button = html("button", "", node);
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const swatch = svg("svg", { width: 22, height: 12, viewBox: "0 0 22 12", "aria-hidden": "true" }, button);
      svg("path", { d: "M1,6H21", class: `trace s${entry.colour % COLOURS}${entry.faint ? " faint" : ""}${entry.colour >= COLOURS ? " dashed" : ""}` }, swatch);
      if (!entry.faint) symbol(swatch, entry.colour, 11, 6, 3.4);
      html("span", "", button, entry.name);
      button.addEventListener("click", () => {
        if (!hidden.delete(entry.key)) hidden.add(entry.key);
        button.setAttribute("aria-pressed", String(!hidden.has(entry.key)));
        again();
      });
    }
  };

  const mount = (node) => {
    const figure = page.figures[node.dataset.figure], plot = node.querySelector(".plot"), hidden = new Set();
    const tip = html("div", "tip");
    tip.hidden = true;
    tip.setAttribute("aria-live", "polite");
    let root = null, over = null, drawing = null, place = null, drawnAt = 0;

    const hide = () => { tip.hidden = true; place = null; if (over) over.replaceChildren(); };
    const tell = (next) => {
      place = next;
      const told = drawing.tell(place), box = drawing.box;
      over.replaceChildren();
      if (told.line) svg("line", { class: "cross", x1: told.x, x2: told.x, y1: told.line[0], y2: told.line[1] }, over);
      if (told.frame) svg("rect", { class: "frame", x: told.frame[0], y: told.frame[1], width: told.frame[2], height: told.frame[3], rx: 1 }, over);
      for (const [colour, px, py] of told.dots || []) symbol(over, colour, px, py, 4.5, "hot");
      tip.replaceChildren();
      html("div", "head", tip, told.head);
      for (const [colour, name, value] of told.lines) {
        const line = html("div", "line", tip);
        if (colour !== null) symbol(svg("svg", { viewBox: "0 0 10 10" }, line), colour, 5, 5, 4);
        html("span", "", line, name);
        html("span", "value", line, value);
      }
      tip.hidden = false;
      const scale = plot.clientWidth / box.width, wide = tip.offsetWidth, tall = tip.offsetHeight;
      const left = told.x * scale + 14 + wide > plot.clientWidth ? told.x * scale - 14 - wide : told.x * scale + 14;
      tip.style.left = `${Math.max(0, Math.min(left, plot.clientWidth - wide))}px`;
      const middle = (told.y === undefined ? box.top + 10 : told.y - 12) * scale - (told.y === undefined ? 0 : tall);
      tip.style.top = `${Math.max(-20, middle)}px`;
    };
    const draw = () => {
      const width = Math.max(240, Math.round(plot.clientWidth)), tall = height(figure, width);
      const focused = document.activeElement === root;
      hide();
      plot.replaceChildren();
      root = svg("svg", { viewBox: `0 0 ${width} ${tall}`, width, height: tall, tabindex: 0, role: "img" }, plot);
      root.setAttribute("aria-label", `${node.querySelector("h3").textContent}. Arrow keys read the values.`);
      plot.append(tip);
      const box = { left: 40, right: width - 4, top: 20, bottom: tall - 44, width };
      drawing = KINDS[figure.kind](figure, root, box, hidden);
      if (drawing) drawing.box = box;
      over = svg("g", {}, root);
      listen();
      if (focused) root.focus();
      drawnAt = plot.clientWidth;
      node.dataset.drawn = figure.kind;
    };
    const listen = () => {
      const at = (event) => {
        if (!drawing) return;
        const frame = root.getBoundingClientRect(), scale = drawing.box.width / frame.width;
        tell(drawing.find((event.clientX - frame.left) * scale, (event.clientY - frame.top) * scale));
      };
      root.addEventListener("pointermove", at);
      root.addEventListener("pointerdown", at);
      root.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
      root.addEventListener("blur", hide);
      root.addEventListener("focus", () => { if (drawing && place === null && root.matches(":focus-visible")) tell(drawing.first); });
      root.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e9, 0], End: [1e9, 0], PageUp: [-20, 0], PageDown: [20, 0] }[event.key];
        if (event.key === "Escape") hide();
        if (!by || !drawing) return;
        event.preventDefault();
        tell(place === null ? drawing.first : drawing.move(place, by[0], by[1]));
      });
    };
    if (figure.series) legend(node.querySelector(".legend"), figure, hidden, draw);
    draw();
    new ResizeObserver(() => { if (plot.clientWidth && Math.abs(plot.clientWidth - drawnAt) > 1) draw(); }).observe(plot);
  };

  let drawn = 0;
  for (const node of document.querySelectorAll("figure[data-figure]")) {
    try {
      mount(node);
      drawn += 1;
    } catch (error) {
      html("p", "empty", node, "This figure could not be drawn.");
      console.error(error);
    }
  }
  // A touch outside a figure puts its values away.
  document.addEventListener("pointerdown", (event) => {
    for (const tip of document.querySelectorAll(".tip")) if (!tip.parentElement.contains(event.target)) tip.hidden = true;
  });
  document.documentElement.dataset.drawn = String(drawn);
})();
