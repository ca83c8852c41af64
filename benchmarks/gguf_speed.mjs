// One GGUF file in llama.cpp; gguf_speed.py runs it, and writes a line to stdin for every turn.
//
// Arguments: the folder of node's modules, the file, threads. A line: `depth`, `tokens` to generate, `type` of K and V,
// `seed` of the prompt. An answer: seconds to the first token, and seconds of the others.
import {createInterface} from "node:readline";
import {join} from "node:path";
import {pathToFileURL} from "node:url";

const [modules, modelPath, threads] = process.argv.slice(2);
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(join(modules, "node-llama-cpp", "dist", "index.js")).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: +threads});
const model = await llama.loadModel({modelPath});
console.log(JSON.stringify({ready: true}));

let open = {key: null, sequence: null, context: null};
async function sequenceOf({depth, tokens, type}) {
    const key = `${depth} ${type}`;
    if (open.key === key) {
        await open.sequence.clearHistory();
        return open.sequence;
    }
    await open.context?.dispose();
    const context = await model.createContext({
        contextSize: depth + tokens + 16, batchSize: 512, threads: +threads, flashAttention: true,
        experimentalKvCacheKeyType: type, experimentalKvCacheValueType: type
    });
    open = {key, context, sequence: context.getSequence()};
    return open.sequence;
}

for await (const line of createInterface({input: process.stdin})) {
    const turn = JSON.parse(line), sequence = await sequenceOf(turn);
    const ids = Array.from({length: turn.depth}, (_, i) => 100 + (31 * i * (turn.seed + 1) + 977 * turn.seed) % 20000);
    const begin = performance.now();
    let first = 0, count = 0;
    for await (const _ of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
        if (count++ === 0) first = performance.now();
        if (count > turn.tokens) break;
    }
    const end = performance.now();
    console.log(JSON.stringify({first_s: (first - begin) / 1000, rest_s: (end - first) / 1000, tokens: count - 1}));
}
