// Notes where the dots are and how many pages are one's own, whenever the picture changes.
() => {
  const seen = window.seen = {places: [], prefill: [], decode: [], filled: []};
  const note = (list, value) => { if (value && list.at(-1) !== value) list.push(value); };
  const count = (selector) => document.querySelectorAll(selector).length;
  new MutationObserver(() => {
    for (const dot of document.querySelectorAll('.dot')) note(seen.places, dot.closest('.stage, .mesh')?.classList[1]);
    for (const role of ['prefill', 'decode']) note(seen[role], count(`.mesh.${role} .cell.mine`));
    note(seen.filled, count('.mesh .cell.filled.mine'));
  }).observe(document.querySelector('#picture'), {subtree: true, childList: true, attributes: true});
}
