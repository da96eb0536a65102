/* Search from a file: browsers start no worker there, so its script runs in a hidden frame instead. */
window.IFrameWorker = class extends EventTarget {
  constructor(address) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    const inside = frame.contentWindow;
    const load = (source) =>
      new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = source;
        script.onload = resolve;
        script.onerror = reject;
        inside.document.head.append(script);
      });
    inside.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
    inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.inside = inside;
    this.ready = load(String(address));
  }

  postMessage(data) {
    this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
  }
};

if (location.protocol === "file:") window.Worker = window.IFrameWorker;
