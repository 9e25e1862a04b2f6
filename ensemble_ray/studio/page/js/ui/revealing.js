// Values in place of the placeholders of a redacted run, in the texts of a part of the page alone: copies, exports, the address
// and the title keep the placeholders. Values are kept in this object, and are gone when the view is closed.

const PLACEHOLDER = /\[[A-Z][A-Z0-9_]*_[0-9a-f]{12}\]/g;

export class Revealing {
  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    /** @type {Record<string, string>|null} null: placeholders are shown */
    this.values = null;
    /** @type {Map<Text, {shown: string, before: string}>} */
    this.changed = new Map();
    this.observer = new MutationObserver((changes) => {
      for (const change of changes) {
        if (change.type === "characterData") this.change(change.target);
        else change.addedNodes.forEach((node) => this.change(node));
      }
      for (const node of this.changed.keys()) if (!node.isConnected) this.changed.delete(node);
    });
  }

  /** @param {Record<string, string>} values by their placeholders */
  show(values) {
    this.values = values;
    this.change(this.root);
    this.observer.observe(this.root, { subtree: true, childList: true, characterData: true });
  }

  hide() {
    this.observer.disconnect();
    this.values = null;
    for (const [node, { shown, before }] of this.changed) if (node.data === shown) node.data = before;
    this.changed.clear();
  }

  /** @param {Node} node */
  change(node) {
    const values = this.values;
    if (!values) return;
    const texts = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
    for (let at = node instanceof Text ? node : texts.nextNode(); at; at = texts.nextNode()) {
      const text = /** @type {Text} */ (at);
      const before = text.data;
      const shown = before.replace(PLACEHOLDER, (name) => (Object.hasOwn(values, name) ? values[name] ?? name : name));
      if (shown === before) continue;
      this.changed.set(text, { shown, before });
      text.data = shown;
    }
  }
}
