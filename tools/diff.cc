// SPDX-License-Identifier: Apache-2.0
// reshard diff: compares two checkpoints tensor by tensor.
#include <cstdio>

#include "formats/object_values.h"
#include "lib/audit/comparison.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "tools/commands.h"
#include "tools/html_report.h"
#include "tools/inspection.h"
#include "tools/job.h"
#include "tools/job_options.h"
#include "tools/outputs.h"

namespace reshard::tools {
namespace {

struct DiffOptions {
  std::string a, b, html;
  std::vector<std::string> paths;  // further ones; diff() puts `a` and `b` in front
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

  DType dtype_a() const { return compared_dtype(a, b); }
  DType dtype_b() const { return compared_dtype(b, a); }
  bool has_values() const { return is_floating(a.dtype) && is_floating(b.dtype); }
  bool differs(double tolerance) const {
    return distance.different > 0 && (!has_values() || !(distance.max_abs <= tolerance));
  }
};

Json pair_json(const ComparedPair& pair, double tolerance) {
  Json row = Json::object();
  row.set("name", pair.a.name)
      .set("kind", kKindNames[static_cast<std::size_t>(state_kind(pair.a.key()))])
      .set("shape", dims_json(pair.a.shape))
      .set("dtype_a", info(pair.dtype_a()).torch_name)
      .set("dtype_b", info(pair.dtype_b()).torch_name)
      .set("different_elements", pair.distance.different);
  if (pair.has_values())
    row.set("max_abs", pair.distance.max_abs)
        .set("relative_l2", pair.distance.relative_l2)
        .set("l2", pair.distance.l2)
        .set("l2_a", pair.distance.a_l2);
  return row.set("elements", pair.a.elements()).set("differs", pair.differs(tolerance));
}

std::string pair_text(const ComparedPair& pair) {
  const auto& [a, b, d] = pair;
  std::string text = printable(a.name) + " " + to_string(a.shape) + "   ";
  if (const DType of_a = pair.dtype_a(), of_b = pair.dtype_b(); of_a != of_b)
    text += std::string(info(of_a).short_name) + " / " + std::string(info(of_b).short_name) + "   ";
  text += with_commas(d.different) + " of " + count_of(a.elements(), "element");
  if (pair.has_values() && d.different > 0)
    text += "   max |a-b| " + scientific(d.max_abs) + "   relative L2 " + scientific(d.relative_l2);
  return text;
}

// Two checkpoints after their comparison.
struct Differences {
  std::string a, b;  // as on the command line
  std::unique_ptr<Comparison> comparison;
  std::vector<Comparison::Distance> distances;
  std::vector<std::string> structural, objects;
  Index beyond = 0;          // tensors that differ by more than the tolerance
  Index objects_of_one = 0;  // of `structural`

  bool equal() const { return beyond == 0 && structural.empty() && objects.empty(); }
  std::vector<ComparedPair> pairs() const {
    std::vector<ComparedPair> out;
    for (std::size_t i = 0; i < distances.size(); ++i) {
      const Comparison::Pair& pair = comparison->pairs()[i];
      out.push_back({comparison->a().tensors()[pair.a], comparison->b().tensors()[pair.b], distances[i]});
    }
    return out;
  }
};

// `a` and `b` stay open while the result is used.
Result<Differences> compare(const DiffOptions& options, const ComparisonOptions& how, Reader& a, Reader& b) {
  Differences out;
  out.comparison = TRY(Comparison::prepare(a, b, how));
  Comparison& c = *out.comparison;
  {
    Progress progress("reading", c.bytes() / 2, options.resources.quiet || options.json);
    c.set_progress([&](Index done) { progress.update(done); });
    out.distances = TRY(c.distances());
  }
  out.structural = c.structural_differences();
  out.objects_of_one = std::ssize(c.objects_of_one());
  out.objects = TRY(c.differing_objects());
  for (const ComparedPair& pair : out.pairs()) out.beyond += pair.differs(options.tolerance) ? 1 : 0;
  return out;
}

Json differences_json(const Differences& found, double tolerance) {
  Json tensors = Json::array();
  for (const ComparedPair& pair : found.pairs()) tensors.push_back(pair_json(pair, tolerance));
  return answer_json("diff")
      .set("a", found.a)
      .set("b", found.b)
      .set("tolerance", tolerance)
      .set("equal", found.equal())
      .set("structure", texts_json(found.structural))
      .set("objects", texts_json(found.objects))
      .set("not_compared", texts_json(found.comparison->not_compared()))
      .set("renamed", texts_json(found.comparison->renamed()))
      .set("tensors", std::move(tensors));
}

// Prints what differs, and, unless the user wants only that, what does not.
void print_differences(const Differences& found, const DiffOptions& options) {
  const bool quiet = options.resources.quiet;
  for (const ComparedPair& pair : found.pairs()) {
    const bool differs = pair.differs(options.tolerance);
    const bool is_shown = differs || (!quiet && (pair.distance.different > 0 || pair.dtype_a() != pair.dtype_b()));
    if (is_shown) print_row(differs ? "differs" : "within", pair_text(pair));
  }
  for (const std::string& s : found.structural) print_row("differs", s);
  for (const std::string& s : found.objects) print_row("differs", "object '" + printable(s) + "'");
  if (quiet) return;
  for (const std::string& s : found.comparison->renamed()) print_row("names", s);
  for (const std::string& s : found.comparison->not_compared()) print_row("not seen", s);
  const Index all = std::ssize(found.distances), missing = std::ssize(found.structural) - found.objects_of_one;
  const Index objects = std::ssize(found.objects) + found.objects_of_one;
  print_row("result", with_commas(all - found.beyond) + " of " + count_of(all, "tensor") + " equal" +
                          (options.tolerance > 0 ? " within " + scientific(options.tolerance) : "") +
                          (missing == 0 ? "" : ", " + count_of(missing, "tensor") + " missing or with another shape") +
                          (objects == 0 ? "" : ", " + count_of(objects, "object") + " missing or different"));
}

// Opens the checkpoints. What the options say of names and layout is about the first.
Result<std::vector<OpenCheckpoint>> open_all(const DiffOptions& options, const OpenOptions& plain,
                                             NotedInputs& inputs) {
  const Opener open = inputs.opener();
  OpenOptions first = plain;
  first.keys = TRY(options.source_layout.keys());
  first.weights = TRY(options.source_layout.which_weights());
  std::vector<OpenCheckpoint> out;
  for (const std::string& path : options.paths) out.push_back(TRY(open(path, out.empty() ? first : plain)));
  if (leads()) TRY(inputs.check(options.html));
  return out;
}

Json series_json(const DiffOptions& options, std::vector<Json> steps, bool equal) {
  if (steps.size() == 1) return std::move(steps[0]);
  Json list = Json::array();
  for (Json& step : steps) list.push_back(std::move(step));
  return answer_json("diffs")
      .set("checkpoints", texts_json(options.paths))
      .set("tolerance", options.tolerance)
      .set("equal", equal)
      .set("steps", std::move(list));
}

Result<int> diff(DiffOptions options) {
  options.paths.insert(options.paths.begin(), {options.a, options.b});
  const RunOptions run = TRY(options.resources.run_options());
  const auto layout = TRY(options.source_layout.load());
  const ModelChoice model = TRY(options.model.choice());
  NotedInputs inputs;
  const OpenOptions plain{
      .layout = layout ? &*layout : nullptr, .own_family = model.families.own(), .config = options.model.config};
  const std::vector<OpenCheckpoint> opened = TRY(open_all(options, plain, inputs));
  const ComparisonOptions how{.model = model,
                              .config = options.model.config,
                              .spool = temporary_directory(),
                              .run = run,
                              .same_value = have_same_value};
  std::vector<Json> steps;
  bool equal = true;
  for (std::size_t i = 1; i < opened.size(); ++i) {
    Differences found = TRY(compare(options, how, *opened[i - 1].reader, *opened[i].reader));
    found.a = options.paths[i - 1], found.b = options.paths[i];
    equal = equal && found.equal();
    if (options.json || !options.html.empty()) steps.push_back(differences_json(found, options.tolerance));
    if (options.json) continue;
    if (opened.size() > 2 && !options.resources.quiet)
      print_row("step", printable(found.a) + " -> " + printable(found.b));
    print_differences(found, options);
  }
  const Json json = steps.empty() ? Json() : series_json(options, std::move(steps), equal);
  if (!options.html.empty()) TRY(write_html(options.html, "diff", inputs.facts(), json));
  if (options.json) show_json(json, opened.size() > 2 ? 3 : 1);
  return equal ? 0 : 1;
}

}  // namespace

void add_diff(CommandLine& line) {
  auto options = std::make_shared<DiffOptions>();
  line.add_option("A", options->a, "First checkpoint").read().required();
  line.add_option("B", options->b, "Second checkpoint").read().required();
  line.add_option("MORE", options->paths, "More checkpoints, each compared with the previous one").read();
  line.group("Report");
  line.add_option("--tolerance", options->tolerance, "Largest |a-b| at which floating-point values count as equal")
      .common()
      .not_negative()
      .shows_default();
  line.add_flag("--json", options->json, "Print the comparison of all tensors as JSON").common();
  add_html_option(line, options->html);
  options->source_layout.add(line);
  options->model.add(line);
  options->resources.add(line);
  line.examples({{"reshard diff step-1000 step-2000", ""},
                 {"reshard diff step-1000 model-bf16 --tolerance 1e-2", ""},
                 {"reshard diff step-1000 step-2000 step-3000 --html run.html", "how far each layer moves"}});
  line.description("Exits with 1 if tensors differ.");
  line.action([options] { return diff(*options); });
}

}  // namespace reshard::tools
