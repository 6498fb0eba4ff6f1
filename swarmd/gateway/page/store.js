// Conversations, kept in this browser only (IndexedDB): the gateway never stores any.

const NAME = "swarmd", STORE = "conversations";
let opened = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opened;
}

async function run(mode, act) {
  const store = (await open()).transaction(STORE, mode).objectStore(STORE);
  const asked = act(store);
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

// The last one changed is first. A browser that keeps nothing (a private window) has none, and chats all the same.
export async function loadAll() {
  const found = await run("readonly", (store) => store.getAll()).catch(() => []);
  return found.sort((a, b) => b.changed - a.changed);
}
export const save = (conversation) => run("readwrite", (store) => store.put(conversation)).catch(() => null);
export const remove = (id) => run("readwrite", (store) => store.delete(id)).catch(() => null);
