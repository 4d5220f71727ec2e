// The newest versions of a session, as far as the daemon keeps them.

import { get } from "./wire.js";

export class Past {
  versions = [];
  #name;
  #revision = 0;
  #reading = null;

  constructor(name) {
    this.#name = name;
  }

  // Read what has changed since it was read last: new versions, late answers, labels. One request at a time.
  read() {
    this.#reading ??= this.#read().finally(() => { this.#reading = null; });
    return this.#reading;
  }

  async #read() {
    const found = await get(`/v1/sessions/${encodeURIComponent(this.#name)}/versions?since=${this.#revision}`);
    const known = new Map(found.revision < this.#revision ? [] : this.versions.map((each) => [each.data_version, each]));
    for (const each of found.versions) {
      each.close = each.close === undefined ? null : Number(each.close);
      each.by = new Map((each.answers || []).map((answer) => [answer.question, answer]));
      known.set(each.data_version, each);
    }
    this.#revision = found.revision;
    this.versions = [...known.values()]
      .filter((each) => each.data_version >= found.oldest && each.data_version <= found.newest)
      .sort((a, b) => a.data_version - b.data_version);
  }

  // How many of the answers to a question have a label, and how many of those were right.
  judged(question) {
    const labelled = this.versions.map((each) => each.by.get(question)).filter((answer) => answer?.label !== undefined);
    return { labels: labelled.length, right: labelled.filter((answer) => answer.label === answer.text).length };
  }
}
