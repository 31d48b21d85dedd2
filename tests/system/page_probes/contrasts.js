// The contrast of every text with what is behind it, as WCAG counts it.
() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 :
    ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const owner = walker.currentNode.parentElement;
    if (!text || !owner.checkVisibility() || owner.closest('.unseen, .skip, .tip, noscript')) continue;
    const style = getComputedStyle(owner);
    let behind = owner;
    while (behind && rgba(getComputedStyle(behind).backgroundColor)[3] < 255) behind = behind.parentElement;
    const [a, b] = [owner instanceof SVGElement ? style.fill : style.color, getComputedStyle(behind).backgroundColor]
      .map((colour) => luminance(rgba(colour)));
    found[`${owner.className.baseVal ?? owner.className} ${text}`] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  return found;
}
