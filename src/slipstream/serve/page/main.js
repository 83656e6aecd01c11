// Opens the page: asks for the key where the server wants one, then starts the two halves, watch and playground.

import { key, ask, Refused } from "./server.js";
import { openPlayground } from "./playground.js";
import { watch } from "./watch.js";

const $ = (id) => document.getElementById(id);

async function open() {
  let models;
  try {
    models = (await (await ask("/v1/models")).json()).data;
  } catch (error) {
    if (error instanceof Refused && error.status === 401) return askForKey(key.get() ? error.message : "");
    $("health").dataset.state = "bad";
    $("health").textContent = "no connection, trying again";
    setTimeout(open, 2000);
    return;
  }
  const { version } = await (await ask("/version")).json();
  $("model").textContent = models[0].id;
  $("model").title = `Slipstream ${version}, context of ${models[0].max_model_len.toLocaleString("en")} tokens`;
  $("forget").hidden = !key.get();
  $("page").inert = false;
  openPlayground(models[0]);
  watch(() => askForKey("the key is not known any more"));
}

function askForKey(why) {
  $("page").inert = true;
  $("key-error").textContent = why;
  if (!$("key-dialog").open) $("key-dialog").showModal();
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  $("key-dialog").close();
  open();
});
$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
$("forget").addEventListener("click", () => {
  key.forget();
  location.reload();
});

open();
