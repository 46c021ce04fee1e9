// A view as a file: SVG with its colours written in, or PNG at twice the size.

const STYLES = ["fill", "stroke", "stroke-width", "stroke-opacity", "fill-opacity", "opacity", "font-size", "font-weight", "font-family", "text-anchor", "dominant-baseline", "shape-rendering", "paint-order", "stroke-linejoin"];

export function svgText(drawn) {
  const copy = drawn.cloneNode(true);
  const [sources, copies] = [drawn, copy].map((root) => [root, ...root.querySelectorAll("*")]);
  sources.forEach((source, i) => {
    const style = getComputedStyle(source);
    for (const name of STYLES) {
      const value = style.getPropertyValue(name);
      if (value) copies[i].setAttribute(name, value);
    }
    copies[i].removeAttribute("class");
  });
  const { width, height } = drawn.viewBox.baseVal;
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  paper.setAttribute("width", width);
  paper.setAttribute("height", height);
  paper.setAttribute("fill", getComputedStyle(document.documentElement).getPropertyValue("--raised").trim());
  copy.prepend(paper);
  return new XMLSerializer().serializeToString(copy);
}

async function pngBlob(drawn) {
  const { width, height } = drawn.viewBox.baseVal;
  const image = new Image(2 * width, 2 * height);
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(drawn))}`;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
}

function save(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function setUpExports() {
  for (const tools of document.querySelectorAll("[data-export]")) {
    const name = tools.dataset.export;
    for (const kind of ["svg", "png"]) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: kind.toUpperCase() });
      button.setAttribute("aria-label", `Save as ${kind.toUpperCase()}`);
      button.addEventListener("click", async () => {
        const drawn = document.querySelector(`#${name} svg`);
        if (!drawn) return;
        save(kind === "svg" ? new Blob([svgText(drawn)], { type: "image/svg+xml" }) : await pngBlob(drawn), `ringspan-${name}.${kind}`);
      });
      tools.append(button);
    }
  }
}
