// What llama.cpp, in node-llama-cpp, makes of a GGUF file: node gguf_files.mjs FILE < {"ids": [...], "text": "...", "prompt": "...", "greedy": 24}
import {readFileSync} from "node:fs";
import {createRequire} from "node:module";
import {join} from "node:path";
import {pathToFileURL} from "node:url";
// The package is found from the working folder, where it is installed, not from this file's
const found = createRequire(join(process.cwd(), "/")).resolve("node-llama-cpp");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(found));
const {ids, text, prompt, greedy} = JSON.parse(readFileSync(0, "utf8"));
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: 1});
const model = await llama.loadModel({modelPath: process.argv[2], gpuLayers: 0});
const context = await model.createContext({contextSize: ids.length + 256, threads: 1});
let sequence = context.getSequence();
const whole = {temperature: 1, topK: 0, topP: 1, minP: 0};  // the softmax of the logits as they are
let nll = 0;
await sequence.controlledEvaluate(
    ids.map((id, i) => i + 1 < ids.length ? [id, {generateNext: {probabilities: true, options: whole}}] : id),
    {onTokenResult: (i, result) => { nll -= Math.log(result.next.probabilities.get(ids[i + 1])); }}
);
const asked = model.tokenize(prompt, true), made = [];
await sequence.clearHistory();
for await (const token of sequence.evaluate(asked, {temperature: 0, yieldEogToken: true})) {
    made.push(token);
    if (made.length >= greedy || model.isEogToken(token)) break;
}
console.log(JSON.stringify({
    nll, count: ids.length - 1, text_ids: model.tokenize(text, true), prompt_ids: asked, greedy_ids: made, greedy: model.detokenize(made, true)
}));
process.exit(0);
