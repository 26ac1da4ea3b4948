// SPDX-License-Identifier: Apache-2.0
// reshard merge.
#include <algorithm>
#include <cctype>
#include <utility>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/convert/weights/expression.h"
#include "tools/commands.h"
#include "tools/job_options.h"
#include "tools/outputs.h"

namespace reshard::tools {
namespace {

struct MergeLine : ConvertOptions {
  std::vector<std::string> paths;  // the sources, then the destination
  std::string weights;             // the numbers of --weights, unless it is model or master
  std::string ema, expression, others_from;
  bool average = false, in_double = false;
};

bool is_name(std::string_view text) {
  return !text.empty() && std::isdigit(static_cast<unsigned char>(text.front())) == 0 &&
         std::all_of(text.begin(), text.end(),
                     [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; });
}

// Parses "base=DIR", or a path, which is then named s1, s2, ... by its position.
Result<MergeSource> source_of(const std::string& place, std::size_t number) {
  const std::size_t equals = place.find('=');
  if (equals != std::string::npos && is_name(place.substr(0, equals)) && !TRY(path_exists(place)))
    return MergeSource{place.substr(0, equals), place.substr(equals + 1)};
  return MergeSource{"s" + std::to_string(number), place};
}

Status check_number(const std::string& option, const std::string& text) {
  const auto json = parse_json(text, option);
  if (json && json->is_number()) return {};
  return usage_error(option + ": expected a number, got '" + printable(text) + "'");
}

Result<std::string> expression_of(const MergeLine& line, const std::vector<std::string>& names) {
  const int ways = (line.average ? 1 : 0) + (line.weights.empty() ? 0 : 1) + (line.ema.empty() ? 0 : 1) +
                   (line.expression.empty() ? 0 : 1);
  if (ways != 1) return usage_error("expected exactly one of --average, --weights, --ema and --expression");
  if (line.average) return mean_of(names);
  if (!line.ema.empty()) {
    TRY(check_number("--ema", line.ema));
    return moving_average(names, line.ema);
  }
  if (!line.expression.empty()) return line.expression;
  const std::vector<std::string> weights = split(line.weights, ',');
  if (weights.size() != names.size())
    return usage_error("--weights: expected " + count_of(std::ssize(names), "number") + ", one for each source, got " +
                       std::to_string(weights.size()));
  for (const std::string& weight : weights) TRY(check_number("--weights", weight));
  return weighted_sum(names, weights);
}

Result<int> merge(MergeLine line) {
  if (line.paths.size() < 3) return see_help("expected at least two sources and a destination", "merge");
  line.destination = line.paths.back();
  line.paths.pop_back();
  if (const std::string& given = line.source_layout.weights; given != "model" && given != "master")
    line.weights = std::exchange(line.source_layout.weights, "model");
  MergeOptions merge;
  std::vector<std::string> names;
  for (const std::string& path : line.paths) {
    merge.sources.push_back(TRY(source_of(path, names.size() + 1)));
    const MergeSource& source = merge.sources.back();
    if (std::find(names.begin(), names.end(), source.name) != names.end())
      return usage_error("two sources are named '" + source.name + "'");
    names.push_back(source.name);
  }
  merge.expression = TRY(expression_of(line, names));
  merge.in_double = line.in_double;
  merge.others_from = line.others_from;
  line.source = merge.sources.front().path;
  line.merge = std::move(merge);
  return convert(line);
}

}  // namespace

void add_merge(CommandLine& line) {
  auto options = std::make_shared<MergeLine>();
  line.add_option("PATHS", options->paths, "Sources (DIR or NAME=DIR), then the destination to create")
      .read()
      .written(Option::Outputs::kBucketsToo)
      .required();
  line.group("Merge");
  line.add_flag("--average", options->average, "Average the sources").common();
  line.add_option("--ema", options->ema, "Moving average in the given order, with this decay: 0.99")
      .takes("DECAY")
      .common();
  line.add_option("--expression", options->expression, "Formula of named sources: 'base + 0.7*(tuned - base)'")
      .takes("FORMULA")
      .common();
  line.add_choice("--accumulate", options->in_double, {{"float32", false}, {"float64", true}},
                  "Precision of the arithmetic")
      .takes("DTYPE")
      .shows_default();
  line.add_option("--others-from", options->others_from,
                  "Source of tensors that are not floating-point (default: all must be equal)")
      .takes("NAME");
  options->add_format(line);
  options->add_changes(line);
  line.option("--weights")
      .under("Merge")
      .takes("NUMBERS")
      .described_as("Sum with these weights: 0.5,0.3,0.2; or the copy to use: model, master")
      .common()
      .means({})
      .completes({"model", "master"});
  line.group("Target");
  line.add_flag("--force", options->force, "Replace the destination if it is a checkpoint").common();
  line.group("Run");
  line.add_flag("--dry-run", options->dry_run, "Check everything, write nothing").common();
  add_state(line, options->state);
  line.add_flag("--json", options->as_json, "Print the result as JSON");
  line.examples(
      {{"reshard merge step-900 step-950 step-1000 model --average --to hf", ""},
       {"reshard merge a b c model --weights 0.5,0.3,0.2 --to hf", ""},
       {"reshard merge base=llama tuned=step-1000 model --expression 'base + 0.7*(tuned - base)' --to hf", ""}});
  line.description(
      "The sources may differ in format, layout, names and dtype. Each element is computed in the order in which the "
      "expression is written; every step is rounded to the precision of --accumulate, and the result to the dtype of "
      "the first source, or --dtype. The config and the tokenizer are copied from the first source.");
  line.action([options] { return merge(*options); });
}

}  // namespace reshard::tools
