// What llama.cpp, in node-llama-cpp, makes of a GGUF file; run by gguf_files.py in a folder with the package:
// node gguf_files.mjs FILE < {"windows": [[ids], ...], "text": "...", "prompt": "...", "greedy": 24}
import {createRequire} from "node:module";
import {join} from "node:path";
import {json} from "node:stream/consumers";
import {pathToFileURL} from "node:url";

const found = createRequire(join(process.cwd(), "/")).resolve("node-llama-cpp");  // not beside this file
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(found));
const {windows, text, prompt, greedy} = await json(process.stdin);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: 1});
const model = await llama.loadModel({modelPath: process.argv[2], gpuLayers: 0});
const context = await model.createContext({contextSize: windows[0].length + 256, threads: 1});
const sequence = context.getSequence();

// The softmax of the logits as they are; the package doesn't give logits
const asked = {generateNext: {probabilities: true, options: {temperature: 1, topK: 0, topP: 1, minP: 0}}};
let nll = 0, tokens = 0;
for (const ids of windows) {
    await sequence.clearHistory();
    await sequence.controlledEvaluate(ids.map((id, i) => i + 1 < ids.length ? [id, asked] : id), {
        onTokenResult: (i, {next}) => { nll -= Math.log(next.probabilities.get(ids[i + 1])); tokens++; }
    });
}
await sequence.clearHistory();
const made = [];
for await (const token of sequence.evaluate(model.tokenize(prompt, true), {temperature: 0, yieldEogToken: true})) {
    if (made.push(token) >= greedy || model.isEogToken(token)) break;
}
const answer = JSON.stringify({nll, tokens, text_ids: model.tokenize(text, true), greedy_ids: made});
process.stdout.write(`${answer}\n`, () => process.exit(0));
