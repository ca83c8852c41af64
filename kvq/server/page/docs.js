// Writes /openapi.json out: routes, the fields of their bodies with types and bounds, and their answers.

const BOUNDS = {
  minimum: "≥ ", maximum: "≤ ", exclusiveMinimum: "> ", exclusiveMaximum: "< ",
  minLength: "characters ≥ ", maxLength: "characters ≤ ", minItems: "items ≥ ", maxItems: "items ≤ ",
};

function element(name, text = "", ...children) {
  const made = document.createElement(name);
  made.textContent = text; // never markup: names and descriptions are texts
  made.append(...children);
  return made;
}

function resolved(schema, document_) {
  const name = schema.$ref?.split("/").pop();
  return name ? document_.components.schemas[name] ?? {} : schema;
}

export function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  const union = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (union) return [...new Set(union.map(typeOf))].join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "anything"}`;
  return [schema.type ?? "anything"].flat().join(" or ");
}

export function boundsOf(schema) {
  const parts = [schema, ...(schema.anyOf ?? schema.oneOf ?? [])];
  return parts.flatMap((part) =>
    Object.entries(BOUNDS).filter(([key]) => key in part).map(([key, words]) => words + part[key].toLocaleString("en")));
}

function fields(schema) {
  const table = element("table");
  const required = new Set(schema.required ?? []);
  table.append(element("tr", "", ...["field", "type", "bounds", "default", ""].map((name) => element("th", name))));
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const standard = required.has(name) ? "required" : "default" in field ? JSON.stringify(field.default) : "";
    table.append(element("tr", "", element("td", "", element("code", name)), element("td", typeOf(field)),
      element("td", boundsOf(field).join(", ")), element("td", standard), element("td", field.description ?? "")));
  }
  return table;
}

function answers(operation) {
  const table = element("table");
  table.append(element("tr", "", element("th", "status"), element("th", "when")));
  for (const [status, answer] of Object.entries(operation.responses)) {
    table.append(element("tr", "", element("td", status), element("td", answer.description ?? "")));
  }
  return table;
}

function route(path, method, operation, document_) {
  const method_ = element("span", method.toUpperCase());
  method_.className = "method";
  const needs = operation.security?.length ? "needs a key" : "";
  const made = element("details", "", element("summary", "", method_, element("code", path), ` ${needs}`));
  const body = operation.requestBody?.content["application/json"]?.schema;
  if (body) made.append(element("h2", "Body"), fields(resolved(body, document_)));
  made.append(element("h2", "Answers"), answers(operation));
  return made;
}

async function write() {
  const state = document.getElementById("state");
  try {
    const answer = await fetch("/openapi.json");
    if (!answer.ok) throw new Error(`/openapi.json: ${answer.status}`);
    const described = await answer.json();
    document.getElementById("version").textContent = described.info.version;
    for (const [path, operations] of Object.entries(described.paths)) {
      for (const [method, operation] of Object.entries(operations)) {
        document.getElementById("routes").append(route(path, method, operation, described));
      }
    }
    state.textContent = "ready";
    state.dataset.state = "ready";
  } catch (error) {
    state.textContent = error.message;
    state.dataset.state = "lost";
  }
}

write();
