// SPDX-License-Identifier: Apache-2.0
// reshard diff: compares two checkpoints tensor by tensor.
#include <cstdio>

#include "lib/base/text.h"
#include "tools/commands.h"
#include "tools/html_report.h"
#include "tools/job.h"
#include "tools/job_options.h"
#include "tools/outputs.h"

namespace reshard::tools {
namespace {

struct DiffOptions {
  std::string a, b, html;
  double tolerance = 0;
  bool json = false;
  SourceOptions source_layout;
  ModelOptions model;
  ResourceOptions resources;
};

std::string scientific(double v) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", v);
  return text;
}

// Two tensors with the same name, and their distance.
struct ComparedPair {
  const Tensor &a, &b;
  const Comparison::Distance& distance;

  bool has_values() const { return is_floating(a.dtype) && is_floating(b.dtype); }
  bool differs(double tolerance) const {
    return distance.different > 0 && (!has_values() || !(distance.max_abs <= tolerance));
  }
};

Json pair_json(const ComparedPair& pair, double tolerance) {
  Json row = Json::object();
  row.set("name", valid_utf8(pair.a.name))
      .set("shape", dims_json(pair.a.shape))
      .set("dtype_a", info(pair.a.dtype).torch_name)
      .set("dtype_b", info(pair.b.dtype).torch_name)
      .set("different_elements", pair.distance.different);
  if (pair.has_values()) row.set("max_abs", pair.distance.max_abs).set("relative_l2", pair.distance.relative_l2);
  return row.set("elements", pair.a.elements()).set("differs", pair.differs(tolerance));
}

std::string pair_text(const ComparedPair& pair) {
  const auto& [a, b, d] = pair;
  std::string text = printable(a.name) + " " + to_string(a.shape) + "   ";
  if (a.dtype != b.dtype)
    text += std::string(info(a.dtype).short_name) + " / " + std::string(info(b.dtype).short_name) + "   ";
  text += with_commas(d.different) + " of " + count_of(a.elements(), "element");
  if (pair.has_values() && d.different > 0)
    text += "   max |a-b| " + scientific(d.max_abs) + "   relative L2 " + scientific(d.relative_l2);
  return text;
}

Result<int> diff(const DiffOptions& options) {
  const RunOptions run = TRY(options.resources.run_options());
  const auto layout = TRY(options.source_layout.load());
  const ModelChoice model = TRY(options.model.choice());
  const OpenOptions plain{.layout = layout ? &*layout : nullptr, .own_family = model.families.own()};
  OpenOptions changed = plain;
  changed.keys = TRY(options.source_layout.keys());
  changed.weights = TRY(options.source_layout.which_weights());
  NotedInputs inputs;
  const Opener open = inputs.opener();
  OpenCheckpoint a = TRY(open(options.a, changed)), b = TRY(open(options.b, plain));
  if (leads()) TRY(inputs.check(options.html));
  const auto c = TRY(Comparison::prepare(
      *a.reader, *b.reader,
      {.model = model, .config = options.model.config, .spool = temporary_directory(), .run = run}));
  std::vector<Comparison::Distance> distances;
  {
    Progress progress("reading", c->bytes() / 2, options.resources.quiet || options.json);
    c->set_progress([&](Index done) { progress.update(done); });
    distances = TRY(c->distances());
  }
  const std::vector<std::string> structural = c->structural_differences();
  const std::vector<std::string> objects = TRY(c->differing_objects());
  const bool as_json = options.json || !options.html.empty();
  Index beyond = 0;
  Json tensors = Json::array();
  for (std::size_t i = 0; i < distances.size(); ++i) {
    const ComparedPair pair{c->a().tensors()[c->pairs()[i].a], c->b().tensors()[c->pairs()[i].b], distances[i]};
    const bool differs = pair.differs(options.tolerance);
    beyond += differs ? 1 : 0;
    if (as_json) tensors.push_back(pair_json(pair, options.tolerance));
    const bool is_shown = differs || (!options.resources.quiet && pair.distance.different > 0) ||
                          (!options.resources.quiet && pair.a.dtype != pair.b.dtype);
    if (!options.json && is_shown) print_row(differs ? "differs" : "within", pair_text(pair));
  }
  const bool good = beyond == 0 && structural.empty() && objects.empty();
  if (as_json) {
    Json other = Json::array(), unseen = Json::array(), blobs = Json::array(), names = Json::array();
    for (const std::string& s : structural) other.push_back(valid_utf8(s));
    for (const std::string& s : objects) blobs.push_back(valid_utf8(s));
    for (const std::string& s : c->not_compared()) unseen.push_back(valid_utf8(s));
    for (const std::string& s : c->renamed()) names.push_back(valid_utf8(s));
    Json json = answer_json("diff");
    json.set("a", valid_utf8(options.a))
        .set("b", valid_utf8(options.b))
        .set("tolerance", options.tolerance)
        .set("equal", good);
    json.set("structure", std::move(other)).set("objects", std::move(blobs)).set("not_compared", std::move(unseen));
    json.set("renamed", std::move(names));
    json.set("tensors", std::move(tensors));
    if (!options.html.empty()) TRY(write_html(options.html, "diff", inputs.facts(), json));
    if (options.json) {
      show_json(json, 1);
      return good ? 0 : 1;
    }
  }
  for (const std::string& s : structural) print_row("differs", s);
  for (const std::string& s : objects) print_row("differs", "object '" + printable(s) + "'");
  if (options.resources.quiet) return good ? 0 : 1;
  for (const std::string& s : c->renamed()) print_row("names", s);
  for (const std::string& s : c->not_compared()) print_row("not seen", s);
  print_row("result", with_commas(static_cast<Index>(distances.size()) - beyond) + " of " +
                          count_of(static_cast<Index>(distances.size()), "tensor") + " equal" +
                          (options.tolerance > 0 ? " within " + scientific(options.tolerance) : "") +
                          (structural.empty() ? ""
                                              : ", " + count_of(static_cast<Index>(structural.size()), "tensor") +
                                                    " missing or with another shape"));
  return good ? 0 : 1;
}

}  // namespace

void add_diff(CommandLine& line) {
  auto options = std::make_shared<DiffOptions>();
  line.add_option("A", options->a, "First checkpoint").read().required();
  line.add_option("B", options->b, "Second checkpoint").read().required();
  line.group("Report");
  line.add_option("--tolerance", options->tolerance, "Largest |a-b| of floating-point values that is equal")
      .common()
      .not_negative()
      .shows_default();
  line.add_flag("--json", options->json, "Print the comparison of all tensors as JSON").common();
  add_html_option(line, options->html);
  options->source_layout.add(line);
  options->model.add(line);
  options->resources.add(line);
  line.examples({{"reshard diff step-1000 step-2000", ""}, {"reshard diff step-1000 model-bf16 --tolerance 1e-2", ""}});
  line.description("Exits with 1 if tensors differ.");
  line.action([options] { return diff(*options); });
}

}  // namespace reshard::tools
