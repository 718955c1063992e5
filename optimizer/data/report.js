"use strict";
(() => {
  const shown = document.getElementById("shown");
  const marks = [...document.querySelectorAll(".plot .mark")];
  if (!shown || !marks.length) return;
  const place = (mark) => Number(mark.dataset.x);
  marks.sort((a, b) => place(a) - place(b));
  let current = Math.max(0, marks.findIndex((m) => m.querySelector(".ring")));

  function show(mark) {
    for (const m of marks) m.classList.toggle("on", m === mark);
    shown.classList.add("on");
    shown.textContent = mark.getAttribute("aria-label");
  }

  function move(to) {
    marks[current].setAttribute("tabindex", "-1");
    current = Math.min(Math.max(to, 0), marks.length - 1);
    marks[current].setAttribute("tabindex", "0");
    marks[current].focus();
  }

  marks.forEach((mark, index) => {
    mark.setAttribute("tabindex", index === current ? "0" : "-1");
    mark.addEventListener("mouseenter", () => show(mark));
    mark.addEventListener("focus", () => show(mark));
    mark.addEventListener("click", () => move(index));
    mark.addEventListener("keydown", (event) => {
      const to = {
        ArrowRight: current + 1,
        ArrowLeft: current - 1,
        Home: 0,
        End: marks.length - 1,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      move(to);
    });
  });
  shown.hidden = false;
})();
