// Conversations, kept in this browser only (IndexedDB): the gateway never stores any.

const NAME = "swarmd", STORE = "conversations";
const tabs = new BroadcastChannel(NAME); // what one tab keeps, the others show
let opened = null, database = null;
export let isKept = true;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    asked.onsuccess = () => resolve(database = asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opened;
}

// Once the database is open a transaction begins and ends at once: a page that closes has no time for more.
function run(mode, act) {
  return database ? transact(database, mode, act) : open().then((found) => transact(found, mode, act));
}

function transact(found, mode, act) {
  const transaction = found.transaction(STORE, mode), asked = act(transaction.objectStore(STORE));
  transaction.commit();
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

// The last one changed is first. A browser that keeps nothing (a private window) has none, and chats all the same.
export async function loadAll() {
  const found = await attempt("readonly", (store) => store.getAll()) ?? [];
  return found.filter((one) => Array.isArray(one.turns)).sort((a, b) => b.changed - a.changed);
}

export const load = (id) => attempt("readonly", (store) => store.get(id));

export async function save(conversation, isGrowing = false) {
  await attempt("readwrite", (store) => store.put(conversation));
  tabs.postMessage({ id: conversation.id, isGrowing });
}

// Tell the other tabs that an answer is still awaited here.
export const sayGrowing = (id) => tabs.postMessage({ id, isGrowing: true });

export async function remove(id) {
  await attempt("readwrite", (store) => store.delete(id));
  tabs.postMessage({ id, isGone: true });
}

// Have ``told`` be called with what another tab has kept or removed: {id, isGone, isGrowing}.
export const onOtherTab = (told) => (tabs.onmessage = ({ data }) => told(data));

async function attempt(mode, act) {
  try {
    return await run(mode, act);
  } catch {
    isKept = false;
    return null;
  }
}
