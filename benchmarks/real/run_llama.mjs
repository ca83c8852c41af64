// llama.cpp's KV types over windows of tokens, beside its own F16 KV; rivals.py runs it.
//
// Reads JSON from stdin: `model`, a GGUF file; `windows`, lists of token ids; `types`, such as Q8_0; `threads`.
// Writes JSON: for each type figures a token, [windows, tokens - 1]. Logits are had as probabilities of the whole
// vocabulary that controlledEvaluate gives for every token, made to sum to one: llama.cpp sums them in fp32.
import {readFileSync} from "node:fs";
import {join} from "node:path";
import {pathToFileURL} from "node:url";

const BASELINE = "F16"; // asked for F32, node-llama-cpp 3.21.1 takes its default, this one
const AT_ONCE = 32; // tokens whose probabilities are held
const FLOOR = 1e-45; // the least that fp32 holds, where a probability is 0
const asked = JSON.parse(readFileSync(0, "utf8"));
const library = join(asked.modules, "node-llama-cpp", "dist", "index.js");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(library).href);

const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: asked.threads});
const model = await llama.loadModel({modelPath: asked.model});
const generateNext = {probabilities: true, options: {temperature: 1, topK: 0, topP: 1, minP: 0}};

async function sequenceOf(type) {
    const context = await model.createContext({
        contextSize: Math.max(...asked.windows.map((ids) => ids.length)) + 8,
        batchSize: 512,
        threads: asked.threads,
        flashAttention: true,
        experimentalKvCacheKeyType: type,
        experimentalKvCacheValueType: type
    });
    return context.getSequence();
}

// Log-probabilities of the vocabulary after each of some tokens, and which is likeliest
async function evaluate(sequence, ids, take) {
    await sequence.controlledEvaluate(ids.map((id) => [id, {generateNext}]), {
        onTokenResult(index, result) {
            const logs = new Float64Array(asked.vocabulary).fill(Math.log(FLOOR));
            let sum = 0, top = -1;
            for (const [token, probability] of result.next.probabilities) {
                if (top < 0) top = token;
                sum += probability;
                logs[token] = Math.log(Math.max(probability, FLOOR));
            }
            const shift = Math.log(sum);
            for (let i = 0; i < logs.length; i++) logs[i] -= shift;
            take(index, logs, top);
        }
    });
}

function divergence(wanted, own) {
    let sum = 0;
    for (let i = 0; i < wanted.length; i++) sum += Math.exp(wanted[i]) * (wanted[i] - own[i]);
    return sum;
}

const sequences = [];
for (const type of [BASELINE, ...asked.types]) sequences.push(await sequenceOf(type));
const figures = asked.types.map(() => ({nll: [], exact_nll: [], kl: [], top1: []}));
let done = 0;
const total = asked.windows.reduce((sum, ids) => sum + ids.length, 0) * sequences.length;
for (const ids of asked.windows) {
    for (const one of figures) for (const rows of Object.values(one)) rows.push([]);
    for (const sequence of sequences) await sequence.clearHistory();
    for (let at = 0; at < ids.length - 1; at += AT_ONCE) {
        const piece = ids.slice(at, Math.min(at + AT_ONCE, ids.length - 1));
        const exact = [];
        await evaluate(sequences[0], piece, (index, logs, top) => { exact[index] = {logs, top}; });
        done += piece.length;
        for (let i = 0; i < figures.length; i++) {
            await evaluate(sequences[i + 1], piece, (index, logs, top) => {
                const wanted = exact[index], target = ids[at + index + 1];
                figures[i].nll.at(-1).push(-logs[target]);
                figures[i].exact_nll.at(-1).push(-wanted.logs[target]);
                figures[i].kl.at(-1).push(divergence(wanted.logs, logs));
                figures[i].top1.at(-1).push(top === wanted.top ? 1 : 0);
            });
            done += piece.length;
            console.error(`${done} ${total}`);
        }
    }
}
process.stdout.write(JSON.stringify(figures), () => process.exit(0));
