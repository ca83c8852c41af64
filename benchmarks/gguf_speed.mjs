// One GGUF file in llama.cpp; gguf_speed.py runs it, and writes a line to stdin for every turn.
//
// Arguments: the folder of node's modules, the file, threads. A line: `depth`, `tokens` to generate, `type` of K and V,
// `seed` of the prompts, number of `slots`, and whether they are prompted `once`, then go on. An answer: seconds until all slots have a token, and until they have all.
import {createInterface} from "node:readline";
import {join} from "node:path";
import {pathToFileURL} from "node:url";

const [modules, modelPath, threads] = process.argv.slice(2);
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(join(modules, "node-llama-cpp", "dist", "index.js")).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: +threads});
const model = await llama.loadModel({modelPath});
console.log(JSON.stringify({ready: true}));

const opened = new Map();
async function sequencesOf({depth, tokens, type, slots, once}) {
    const key = `${depth} ${type} ${slots}`;
    if (!opened.has(key)) {
        if (!once) for (const old of opened.values()) await old.context.dispose();
        if (!once) opened.clear();
        const context = await model.createContext({
            contextSize: depth + (once ? 16 : 1) * tokens + 16, batchSize: 512, sequences: slots, threads: +threads,
            flashAttention: true, experimentalKvCacheKeyType: type, experimentalKvCacheValueType: type
        });
        opened.set(key, {context, sequences: Array.from({length: slots}, () => context.getSequence())});
    }
    const {sequences} = opened.get(key);
    if (!once) for (const sequence of sequences) await sequence.clearHistory();
    return sequences;
}

// The time at which a sequence has its first token.
async function run(sequence, {depth, tokens, seed}, slot) {
    const fresh = sequence.nextTokenIndex > 0 ? 1 : depth;
    const ids = Array.from({length: fresh}, (_, i) => 100 + (31 * i * (seed + 1) + 977 * seed + 13 * slot) % 20000);
    let first = 0, count = 0;
    for await (const _ of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
        if (count++ === 0) first = performance.now();
        if (count > tokens) break;
    }
    return first;
}

for await (const line of createInterface({input: process.stdin})) {
    const turn = JSON.parse(line), sequences = await sequencesOf(turn);
    const begin = performance.now();
    const first = Math.max(...await Promise.all(sequences.map((sequence, i) => run(sequence, turn, i))));
    const end = performance.now();
    console.log(JSON.stringify({first_s: (first - begin) / 1000, all_s: (end - begin) / 1000}));
}
