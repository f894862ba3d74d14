"use strict";
// The driver of a persistent Node.js: runs code that arrives on a descriptor, again and again, in one process.
//
// Started as `node --no-force-async-hooks-checks node.js [session] RUNS`. Without the option Node.js does not survive
// the interrupt of a timer. The word announces that more than one run may come, which makes the first one faster.
//
// A session's code is evaluated by V8's own REPL mode, through the inspector of this very thread: `let`, `const` and
// `class` can be declared anew, and `await` works at the top level. Between runs the event loop goes on, and so do
// timers, sockets and child processes.
//
// A run that is the only one of its process is compiled as the main module, as `node main.js` would, and ends when
// nothing is left to do.

const fs = require("fs");

const CONTROL = 3;
const CODE = 4;
const STDIN = 5;
const RUNS = process.argv[process.argv.length - 1];
const IS_SESSION = process.argv.length > 3;
const HERE = process.cwd();
// User code may replace these.
const soon = setImmediate;
const { then } = Promise.prototype;
const { closeSync, openSync, readSync, writeSync } = fs;
const MAIN = `${HERE === "/" ? "" : HERE}/main.js`; // what relative names start from; no such file need exist

let run = null; // the active one
let session = null; // with the inspector
let isEvaluating = false; // whether user code of the active run is on the stack
let stdin = null; // the run's stream, once it was asked for
let isMuted = false; // whether user code has called process.exit(), and what it still prints is lost
const sources = new Map(); // name to code, of the last runs

let watcher = null; // the thread that waits for interrupts
let shared = null; // with it
// The number of the run, odd while it is active; the same of the one last interrupted; how many interrupts this thread
// has seen; what wakes the other; and whether that waits.
const [RUN, INTERRUPTED, SEEN, BELL, ARMED] = [0, 1, 2, 3, 4];

process.on("SIGINT", interrupted);
writeSync(CONTROL, "ready\n");

// The rest is done while the host does something else.

const { inspect } = require("util");
const Module = require("module");
const vm = require("vm");
const main = makeMainModule();

// ---- the host -------------------------------------------------------------------------------------------------------

function readHeader() {
  const buffer = Buffer.alloc(4096);
  let text = "";
  while (!text.includes("\n")) {
    const size = readSync(CONTROL, buffer, 0, buffer.length, null);
    if (size === 0) process.reallyExit(0); // the host is gone
    text += buffer.latin1Slice(0, size);
  }
  return text;
}

function listen() {
  const { Socket } = require("net");
  let text = "";
  new Socket({ fd: CONTROL, readable: true, writable: true })
    .on("data", (data) => {
      text += data.latin1Slice();
      if (text.includes("\n")) {
        const header = text;
        text = "";
        soon(begin, header); // a signal that came before is dealt with before
      }
    })
    .on("end", () => reallyExit(0))
    .on("error", () => reallyExit(0));
}

function answer(token, code) {
  writeSync(CONTROL, `done ${token} ${code}\n`);
}

// ---- what user code finds -------------------------------------------------------------------------------------------

const reallyExit = process.reallyExit.bind(process);

function makeMainModule() {
  const main = new Module(MAIN, null);
  main.filename = MAIN;
  main.paths = Module._nodeModulePaths(HERE);
  delete require.cache[__filename];
  process.mainModule = main;
  process.argv.splice(1);
  process.execArgv.splice(0);
  return main;
}

function setUp() {
  for (const [fd, name] of [
    [1, "stdout"],
    [2, "stderr"],
  ]) {
    const { get, enumerable } = Object.getOwnPropertyDescriptor(process, name);
    let stream = null;
    const getOnce = () => (stream ??= makeDirect(Reflect.apply(get, process, []), fd));
    Object.defineProperty(process, name, { configurable: true, enumerable, get: getOnce });
  }
  Error.prepareStackTrace = formatStack;
  process.on("uncaughtException", uncaught);
}

// What a stream holds back when its pipe is full would be lost at an exit, or come after the end of its run; and what
// is interrupted in the middle of a write never writes again. So writes are direct, and over when they return.
function makeDirect(stream, fd) {
  const { write } = stream;
  stream._handle?.setBlocking?.(true);
  stream.write = function (chunk, encoding, callback) {
    const name = typeof encoding === "string" ? encoding : "utf8";
    const bytes = typeof chunk === "string" ? Buffer.from(chunk, name) : chunk;
    if (!(bytes instanceof Uint8Array)) return Reflect.apply(write, this, [chunk, encoding, callback]); // an error
    const done = typeof encoding === "function" ? encoding : callback;
    if (!isMuted) writeAll(fd, bytes);
    if (typeof done === "function") process.nextTick(done);
    return true;
  };
  return stream;
}

function writeAll(fd, bytes) {
  for (let at = 0; at < bytes.length; ) {
    try {
      at += writeSync(fd, bytes, at);
    } catch (error) {
      if (error.code !== "EAGAIN") throw error;
      Atomics.wait(PAUSE, 0, 0, 1); // a child process has made the pipe non-blocking again
    }
  }
}

const PAUSE = new Int32Array(new SharedArrayBuffer(4));

function define(name, value) {
  Object.defineProperty(globalThis, name, { configurable: true, writable: true, enumerable: false, value });
}

function setUpSession() {
  const { Session } = require("inspector");
  session = new Session();
  session.connect();
  // With a session the inspector would see, and keep, whatever is logged.
  for (const [name, method] of Object.entries(console)) {
    const plain = console.Console.prototype[name];
    if (typeof method === "function" && typeof plain === "function") console[name] = plain.bind(console);
  }

  const require_ = Module.createRequire(MAIN);
  require_.main = main;
  define("require", require_);
  define("module", main);
  define("exports", main.exports);
  define("__filename", MAIN);
  define("__dirname", HERE);
  for (const name of Module.builtinModules) {
    if (/^[a-z]\w*$/.test(name) && !(name in globalThis)) {
      Object.defineProperty(globalThis, name, {
        configurable: true,
        enumerable: false,
        get: () => {
          define(name, require(name));
          return globalThis[name];
        },
        set: (value) => define(name, value),
      });
    }
  }

  // V8 has no way to import for code of the inspector; for a module that was loaded it has.
  const importer = new Module(MAIN, null);
  importer._compile("module.exports = (name, options) => (options ? import(name, options) : import(name))", MAIN);
  const import_ = importer.exports;
  const { pathToFileURL } = require("url");
  import_.meta = Object.freeze({
    dirname: HERE,
    filename: MAIN,
    url: pathToFileURL(MAIN).href,
    resolve: (name) => {
      const found = require_.resolve(name);
      return Module.builtinModules.includes(found) ? `node:${found}` : String(pathToFileURL(found));
    },
  });
  define(IMPORT, import_);
}

function replaceStdin(size) {
  stdin?.destroy();
  stdin = null;
  try {
    closeSync(0);
  } catch {
    // user code has done so
  }
  // The lowest number that is free, which is 0, unless another thread opens something right now.
  const fd = openSync(size > 0 ? `/proc/self/fd/${STDIN}` : "/dev/null", "r");
  Object.defineProperty(process, "stdin", {
    configurable: true,
    enumerable: true,
    get: () => {
      stdin ??= Object.assign(new fs.ReadStream(null, { fd, autoClose: false }), { fd });
      return stdin;
    },
  });
}

// ---- runs -----------------------------------------------------------------------------------------------------------

function begin(header) {
  const [, token, number, codeBytes, stdinBytes, , flags] = header.trim().split(" ");
  const bytes = Buffer.allocUnsafe(Number(codeBytes));
  for (let at = 0; at < bytes.length; ) {
    const size = readSync(CODE, bytes, at, bytes.length - at, at);
    if (size === 0) throw new Error("the code is shorter than announced");
    at += size;
  }
  const code = bytes.utf8Slice();
  process.exitCode = undefined;
  const has = (flag) => flags.split(",").includes(flag);
  if (has("once")) {
    replaceStdin(Number(stdinBytes));
    run = { token, file: MAIN, isOnce: true, isSettled: false, isPending: false, exit: undefined };
    remember(run.file, code);
    runOnce(code);
    return;
  }
  if (session === null) {
    if (watcher === null) watch();
    listen();
    setUpSession();
    process.exit = exit;
    Atomics.wait(shared, ARMED, 0, 5000); // the threads have started side by side
  }
  replaceStdin(Number(stdinBytes));
  keepWatching();
  Atomics.add(shared, RUN, 1);
  run = { token, file: `${RUNS}/${number}.js`, isOnce: false, isSettled: false, echo: has("echo"), exit: undefined };
  remember(run.file, code);
  evaluate(code, run);
}

function evaluate(code, run) {
  const text = run.echo && isObject(code) ? `(${code.trim()})` : code;
  const expression = `${withImports(text)}\n//# sourceURL=${run.file}`;
  const options = { expression, replMode: true, awaitPromise: true, objectGroup: run.token };
  isEvaluating = true;
  try {
    session.post("Runtime.evaluate", options, (error, answer) => evaluated(run, error, answer));
  } finally {
    isEvaluating = false;
  }
}

// As in a REPL, what can be either is an object and not a block.
function isObject(code) {
  return /^\s*\{[^]*\}\s*$/.test(code) && compiles(`(${code.trim()}\n)`);
}

function compiles(code) {
  try {
    return new vm.Script(code) !== null;
  } catch {
    return false;
  }
}

function evaluated(run, error, answer) {
  if (run.isSettled) return;
  if (Atomics.load(shared, INTERRUPTED) === Atomics.load(shared, RUN) && process.listenerCount("SIGINT") === 1) {
    settle(run, 130); // whatever it was that the signal ended it with, as that of a child process
    return;
  }
  if (error) {
    // What ends an evaluation without an answer: process.exit(), and an interrupt.
    settle(run, run.exit ?? 130);
    return;
  }
  const { result, exceptionDetails: details } = answer;
  const object = details ? details.exception : result;
  const value = take(object);
  session.post("Runtime.releaseObjectGroup", { objectGroup: run.token });
  if (details) {
    fail(run, value, details);
  } else if (object.subtype === "promise") {
    // The last thing that much code does is to call its main function.
    Reflect.apply(then, value, [() => complete(run, value), (reason) => fail(run, reason)]);
  } else {
    complete(run, value);
  }
}

function complete(run, value) {
  if (run.isSettled) return;
  if (run.echo && value !== undefined) process.stdout.write(`${inspect(value, { showProxy: true })}\n`);
  // Input that is being read ends soon, as it is a file, and code that waits for its end would print into the next run.
  const isRead = stdin !== null && !stdin.destroyed && !stdin.readableEnded;
  if (isRead && (stdin.readableFlowing || stdin.listenerCount("readable") > 0)) {
    for (const event of ["end", "close", "error"]) stdin.once(event, () => soon(settle, run));
  } else {
    settle(run);
  }
}

function fail(run, error, details) {
  if (run.isSettled || error === EXIT) return;
  report(error, details);
  settle(run, error?.signal === "SIGINT" ? 130 : 1); // a child process may be faster to tell
}

// Not at once: what was rejected meanwhile and has no handler is a failure of this run, and is known a moment later.
function settle(run, code) {
  if (run.isSettled) return;
  run.isSettled = true;
  run.exit ??= code;
  soon(() => soon(finish, run));
}

function finish(ended) {
  const code = Number(ended.exit ?? process.exitCode ?? 0) & 255;
  process.exitCode = undefined;
  Atomics.add(shared, RUN, 1);
  keepWatching();
  isMuted = false;
  run = null;
  answer(ended.token, code);
}

// Hands over what the inspector only describes.
function take(object) {
  if (object.objectId === undefined) {
    if (object.unserializableValue === undefined) return object.type === "object" ? null : object.value;
    const text = object.unserializableValue;
    return text.endsWith("n") ? BigInt(text.slice(0, -1)) : Number(text);
  }
  let taken;
  define(TAKE, (value) => (taken = value));
  const functionDeclaration = `function () { "use strict"; ${TAKE}(this); }`;
  session.post("Runtime.callFunctionOn", { objectId: object.objectId, functionDeclaration, silent: true });
  delete globalThis[TAKE];
  return taken;
}

const TAKE = "__hutch_take";

// ---- the only run ---------------------------------------------------------------------------------------------------

function runOnce(code) {
  const emit = process.emit;
  process.emit = function (event, ...rest) {
    try {
      return Reflect.apply(emit, this, [event, ...rest]);
    } finally {
      if (event === "exit" && this === process) answerOnce(process.exitCode ?? rest[0] ?? 0);
    }
  };
  process.argv[1] = MAIN;
  process.removeListener("SIGINT", interrupted); // it ends with the process, whatever that is doing
  try {
    runMain(code);
  } catch (error) {
    uncaught(error);
  }
}

function runMain(code) {
  if (/\b(?:import|await)\b/.test(code) && !compiles(Module.wrap(code))) {
    runModule(code);
  } else {
    require.cache[MAIN] = main;
    main._compile(code, MAIN, "commonjs");
    main.loaded = true;
  }
}

// What is no script for its `import` or `await` is one for the session's way.
function runModule(code) {
  setUpSession();
  run.isPending = true;
  process.on("beforeExit", () => {
    if (run.isPending) {
      process.stderr.write("Warning: Detected unsettled top-level await\n");
      process.exit(13);
    }
  });
  const expression = `${withImports(code)}\n//# sourceURL=${MAIN}`;
  session.post("Runtime.evaluate", { expression, replMode: true, awaitPromise: true }, (error, answer) => {
    run.isPending = false;
    if (!error && answer.exceptionDetails) {
      report(take(answer.exceptionDetails.exception), answer.exceptionDetails);
      process.exitCode ??= 1;
      process.exit();
    }
  });
}

function answerOnce(code) {
  if (run.isSettled) return;
  run.isSettled = true;
  answer(run.token, Number(code) & 255);
}

// ---- ends -----------------------------------------------------------------------------------------------------------

const EXIT = new Error("process.exit() ends this run");
EXIT.stack = `Error: ${EXIT.message}`;

function exit(code) {
  if (code !== undefined) process.exitCode = code;
  const status = Number(process.exitCode ?? 0) & 255;
  const listeners = process.rawListeners("exit");
  process.removeAllListeners("exit"); // they are called once
  for (const listener of listeners) Reflect.apply(listener, process, [status]);
  if (run !== null && !run.isSettled) {
    run.exit = Number(process.exitCode ?? status) & 255;
    if (isEvaluating) {
      // Nothing of the code that is on the stack goes on, no `catch` and no `finally`.
      session.post("Runtime.terminateExecution");
      for (;;);
    }
    isMuted = true; // whoever catches what is thrown here has nothing to say any more
    settle(run, run.exit);
  }
  throw EXIT; // in a callback, Node.js does not survive a termination
}

function interrupted() {
  if (run !== null && process.listenerCount("SIGINT") === 1) settle(run, 130);
}

// A thread of its own takes SIGINT, as this one does not hear of it while user code does not return. There the signal
// ends a script that does nothing but wait. What follows is a message to this thread, and where that has no time for
// messages one of the inspector, for which V8 stops even in a loop that never ends.

function watch() {
  const { Worker } = require("worker_threads");
  shared = new Int32Array(new SharedArrayBuffer(20));
  watcher = new Worker(`(${watchMain})()`, {
    eval: true,
    workerData: { shared, RUN, INTERRUPTED, SEEN, BELL, ARMED },
    stdout: false,
    stderr: false,
    resourceLimits: { maxOldGenerationSizeMb: 32, maxYoungGenerationSizeMb: 4, stackSizeMb: 1 },
  });
  watcher.on("message", () => {
    Atomics.add(shared, SEEN, 1);
    Atomics.notify(shared, SEEN);
    process.emit("SIGINT", "SIGINT", 2);
  });
  watcher.on("error", () => {}); // without it, an interrupt waits for user code to return
  watcher.unref();
}

// User code that takes away all listeners takes the signal from everybody.
function keepWatching() {
  if (process.listeners("SIGINT").includes(interrupted)) return;
  process.on("SIGINT", interrupted);
  Atomics.add(shared, BELL, 1);
  Atomics.notify(shared, BELL);
}

function watchMain() {
  const { Session } = require("inspector");
  const vm = require("vm");
  const { parentPort, workerData } = require("worker_threads");
  const { shared, RUN, INTERRUPTED, SEEN, BELL, ARMED } = workerData;

  function interrupt() {
    const run = Atomics.load(shared, RUN);
    const seen = Atomics.load(shared, SEEN);
    if (run % 2 === 0) return;
    Atomics.store(shared, INTERRUPTED, run);
    parentPort.postMessage(null);
    Atomics.wait(shared, SEEN, seen, 250);
    const isStuck = Atomics.load(shared, SEEN) === seen && Atomics.load(shared, RUN) === run;
    if (!isStuck) return;
    const session = new Session();
    session.connectToMainThread();
    session.post("Runtime.terminateExecution");
    Atomics.wait(shared, RUN, run, 100);
    session.disconnect(); // at its end the process would wait for that
  }

  // The outer script keeps the signal while the inner one is between two waits.
  globalThis.waitInside = () => {
    Atomics.store(shared, ARMED, 1);
    Atomics.notify(shared, ARMED);
    Atomics.wait(shared, BELL, bell);
  };
  globalThis.waitOutside = () => {
    while (Atomics.load(shared, BELL) === bell) {
      if (isInterrupted(inner)) interrupt();
    }
  };
  const inner = new vm.Script("waitInside()");
  const outer = new vm.Script("waitOutside()");
  const isInterrupted = (script) => {
    try {
      script.runInThisContext({ breakOnSigint: true });
      return false;
    } catch {
      return true;
    }
  };
  let bell;
  for (;;) {
    bell = Atomics.load(shared, BELL);
    if (isInterrupted(outer)) interrupt();
  }
}

function uncaught(error) {
  if (error === EXIT || process.listenerCount("uncaughtException") > 1) return;
  report(error);
  if (run === null) return;
  if (run.isOnce) {
    process.exitCode ??= 1;
    process.exit();
  }
  if (run.isSettled) run.exit ||= 1;
  settle(run, 1);
}

// ---- errors ---------------------------------------------------------------------------------------------------------

function remember(name, code) {
  sources.delete(name);
  if (code.length < 1 << 18) sources.set(name, code);
  if (sources.size > 64) sources.delete(sources.keys().next().value);
}

// As Node.js does: the line, a caret below it, and the stack.
function report(error, details) {
  let text;
  try {
    text = inspect(error);
  } catch (failure) {
    text = `[what was thrown cannot be shown: ${failure?.message}]`;
  }
  const isError = error instanceof Error || Object.prototype.toString.call(error) === "[object Error]";
  if (isError && text === `[${error.stack}]`) text = error.stack; // brackets for want of frames
  const place = (isError && findPlace(String(error.stack))) || findDetails(error, details);
  let head = "";
  if (place !== null) {
    const line = (sources.get(place.name) ?? "").split("\n", place.line)[place.line - 1];
    head = `${place.name}:${place.line}\n`;
    if (line !== undefined && line.length < 1000) {
      head += `${line}\n${line.slice(0, place.column - 1).replace(/[^\t]/g, " ")}^\n`;
    }
    head += isError ? "\n" : "";
  }
  process.stderr.write(`${head}${isError ? "" : "Uncaught "}${text}\n`);
}

function findPlace(stack) {
  for (const line of stack.split("\n")) {
    const found = /^ {4}at (?:.* \()?(.*?):(\d+):(\d+)\)?$/.exec(line);
    if (found !== null && !found[1].startsWith("node:")) {
      return sources.has(found[1]) ? { name: found[1], line: Number(found[2]), column: Number(found[3]) } : null;
    }
  }
  return null;
}

function findDetails(error, details) {
  const isHere = details !== undefined && (error instanceof SyntaxError || details.url === run.file);
  if (!isHere || run === null) return null;
  return { name: run.file, line: details.lineNumber + 1, column: details.columnNumber + 1 };
}

// Errors of Node.js itself carry this symbol, and their code in the first line of the stack.
const NODES_OWN = (() => {
  try {
    Buffer.alloc("");
  } catch (error) {
    for (let object = error; object !== null; object = Object.getPrototypeOf(object)) {
      const found = Object.getOwnPropertySymbols(object).find((symbol) => symbol.description === "kIsNodeError");
      if (found !== undefined) return found;
    }
  }
  return Symbol("none");
})();

// The usual stack, without the driver and the inspector below user code.
function formatStack(error, frames) {
  let text;
  try {
    const isNodes = NODES_OWN in error;
    text = isNodes ? `${error.name} [${error.code}]: ${error.message}` : Error.prototype.toString.call(error);
  } catch {
    text = "<error>";
  }
  const isBelow = (name, call) => name === "node:inspector" || (name === __filename && call === "runMain");
  const below = frames.findIndex((frame) => isBelow(frame.getFileName(), frame.getFunctionName()));
  const shown = (below === -1 ? frames : frames.slice(0, below)).filter((frame) => frame.getFileName() !== __filename);
  return [text, ...shown].join("\n    at ");
}

// ---- imports --------------------------------------------------------------------------------------------------------

// As long as the word it stands for, so that nothing moves.
const IMPORT = "$mport";

const either = (flags, ...parts) => new RegExp(parts.map((part) => part.source).join("|"), flags);
const all = (flags, ...parts) => new RegExp(parts.map((part) => part.source).join(""), flags);
const TOKEN = either(
  "g",
  /\/\/.*|\/\*[^]*?\*\//,
  /'(?:[^'\\\n]|\\[^])*'|"(?:[^"\\\n]|\\[^])*"/,
  /[\w$\u0080-\uffff]+|=>|\+\+|--|\?\.|\s+|[^]/,
);
const REGEXP = /\/(?:[^\\/[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\/\w*/y;
const TEMPLATE = /(?:[^`\\$]|\\[^]|\$(?!\{))*(`|\$\{)/y;
const STATIC = all(
  "y",
  /import\b\s*(?:([\w$\s{},*\u0080-\uffff"'-]*?)\s*\bfrom\s*|(?=["']))/,
  /(["'])([^"'\n]*)\2(?:\s*\b(?:with|assert)\s*(\{[^{}]*\}))?[ \t]*;?/,
);
const BEFORE_REGEXP = either(
  "",
  /^(?:await|case|delete|do|else|in|instanceof|new|of|return|throw|typeof|void|yield)$/,
  /^[^\w$)\]}"'`]/,
);

// Neither `import()` nor `import.meta` nor the statement is known to V8 here. This is not a parser: it knows what is
// text and what is code, and how deep it is in brackets.
function withImports(code) {
  if (!/\bimport\b/.test(code)) return code;
  const parts = [];
  const templates = []; // how deep in brackets each open `${` was
  let depth = 0;
  let before = ";"; // the token before, blanks and comments apart
  let startsLine = true;
  let copied = 0;
  let at = 0;
  const replace = (end, text) => {
    parts.push(code.slice(copied, at), text);
    copied = at = end;
  };
  const skipTemplate = () => {
    TEMPLATE.lastIndex = at;
    const found = TEMPLATE.exec(code);
    at = found === null ? code.length : TEMPLATE.lastIndex;
    before = "`";
    if (found !== null && found[1] === "${") {
      templates.push(depth++);
      before = "{";
    }
  };
  while (at < code.length) {
    TOKEN.lastIndex = at;
    const [token] = TOKEN.exec(code);
    const end = at + token.length;
    if (/^(?:\s|\/\/|\/\*)/.test(token)) {
      startsLine ||= token.includes("\n");
      at = end;
      continue;
    }
    if (token === "`") {
      at = end;
      skipTemplate();
    } else if (token === "}" && templates.length > 0 && templates[templates.length - 1] === depth - 1) {
      depth = templates.pop();
      at = end;
      skipTemplate();
    } else if (token === "/" && BEFORE_REGEXP.test(before)) {
      REGEXP.lastIndex = at;
      at = REGEXP.test(code) ? REGEXP.lastIndex : end;
      before = ")";
    } else if (token === "import" && before !== "." && before !== "?.") {
      STATIC.lastIndex = at;
      const found = depth === 0 && (startsLine || before === ";" || before === "}") ? STATIC.exec(code) : null;
      if (isExpression(code, end)) {
        replace(end, IMPORT);
        before = token;
      } else if (found !== null) {
        const lines = found[0].split("\n").length - 1;
        replace(at + found[0].length, importStatement(found) + "\n".repeat(lines));
        before = ";";
      } else {
        at = end;
        before = token;
      }
    } else {
      if (token === "(" || token === "[" || token === "{") depth++;
      if (token === ")" || token === "]" || token === "}") depth--;
      at = end;
      before = token;
    }
    startsLine = false;
  }
  return parts.join("") + code.slice(copied);
}

function isExpression(code, at) {
  if (/^\s*\.\s*meta\b/.test(code.slice(at, at + 200))) return true;
  if (!/^\s*\(/.test(code.slice(at, at + 200))) return false;
  let depth = 0;
  while (at < code.length) {
    if (code[at] === "(") depth++;
    if (code[at] === ")" && --depth === 0) break;
    at++;
  }
  return !/^\s*\{/.test(code.slice(at + 1, at + 200)); // or else it is a method of that name
}

function importStatement([, clause, quote, name, attributes]) {
  const call = `await ${IMPORT}(${quote}${name}${quote}${attributes ? `, { with: ${attributes} }` : ""})`;
  if (!clause) return `void ${call};`;
  const named = /\{([^}]*)\}/.exec(clause);
  const [, whole] = /\*\s*as\s+([^\s,]+)/.exec(clause) ?? [];
  const [, only] = /^([^\s,{*]+)/.exec(clause) ?? [];
  const parts = named === null ? [] : [named[1].replace(/\s+as\s+/g, ": ").replace(/\s+/g, " ").trim()];
  if (only !== undefined) parts.unshift(`default: ${only}`);
  const names = `{ ${parts.filter(Boolean).join(", ")} }`;
  if (whole === undefined) return `const ${names} = ${call};`;
  return `const ${whole} = ${call}${only === undefined ? "" : `, ${names} = ${whole}`};`;
}

// ---- the beginning --------------------------------------------------------------------------------------------------

setUp();
if (IS_SESSION) watch();
soon(begin, readHeader()); // signals that came meanwhile are dealt with before
