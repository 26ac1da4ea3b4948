// SPDX-License-Identifier: Apache-2.0
#include "tools/report_sections.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/machine.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "tools/line_chart.h"
#include "tools/markup.h"

namespace reshard::tools {
namespace {

constexpr std::string_view kMaps = "<div id=\"maps\"></div>\n";
constexpr std::size_t kMostFindings = 500;

// ---- members of the JSON, which this program wrote

std::span<const Json> list(const Json& object, std::string_view key) {
  const auto items = object.get_array(key);
  return items ? *items : std::span<const Json>();
}
std::string text(const Json& object, std::string_view key) {
  const auto value = object.get_string(key);
  return value ? std::string(*value) : std::string();
}
Index number(const Json& object, std::string_view key) {
  const auto value = object.get_index(key);
  return value ? *value : 0;
}
bool is_set(const Json& object, std::string_view key) {
  const auto value = object.get_bool(key);
  return value.has_value() && *value;
}
// Returns a member's number; infinity for null, which stands for a number that is not finite.
double real(const Json& object, std::string_view key) {
  const Json* value = object.find(key);
  const auto number = value ? value->as_double() : Result<double>(0.0);
  return number ? *number : std::numeric_limits<double>::infinity();
}
std::vector<std::string> texts(const Json& object, std::string_view key) {
  std::vector<std::string> out;
  for (const Json& item : list(object, key))
    if (const auto value = item.as_string()) out.emplace_back(*value);
  return out;
}
std::string shape_text(const Json& object) {
  std::vector<std::string> sizes;
  for (const Json& n : list(object, "shape")) sizes.push_back(std::to_string(*n.as_index()));
  return "[" + join(sizes, ", ") + "]";
}
Index elements(const Json& tensor) {
  Index n = 1;
  for (const Json& size : list(tensor, "shape")) n *= *size.as_index();
  return n;
}

std::string plain(const std::string& html) { return html.empty() ? html : "<div class=\"plain\">" + html + "</div>\n"; }

// ---- verify, check

std::string article(const Json& finding, std::size_t number) {
  const std::vector<std::string> tensors = texts(finding, "tensors");
  const std::string severity = text(finding, "severity");
  std::string out = "<article class=\"finding " + severity + "\" id=\"finding-" + std::to_string(number) +
                    "\"><h3><em>" + severity + "</em> ";
  if (tensors.size() == 1) out += "<code>" + markup_escaped(tensors[0]) + "</code> ";
  out += markup_escaped(text(finding, "what")) + "</h3>";
  out += html_list(texts(finding, "why"));
  if (const std::string lost = text(finding, "lost"); !lost.empty())
    out += "<p class=\"lost\">" + markup_escaped(lost) + "</p>";
  if (const std::string advice = text(finding, "advice"); !advice.empty())
    out += "<p>" + markup_escaped(advice) + "</p>";
  out += "<p class=\"hint\">" + markup_escaped(text(finding, "id")) + "</p>";
  if (tensors.size() > 1)
    out += "<details class=\"names\"><summary>" + count_of(std::ssize(tensors), "tensor") + "</summary>" +
           html_list(tensors) + "</details>";
  return out + "</article>\n";
}

std::string findings_html(const Json& data) {
  const auto findings = list(data, "findings");
  std::string out;
  for (std::size_t i = 0; i < std::min(findings.size(), kMostFindings); ++i) out += article(findings[i], i);
  if (findings.size() > kMostFindings)
    out += "<p class=\"hint\">and " + with_commas(std::ssize(findings) - Index{kMostFindings}) +
           " more (--json has all)</p>";
  return html_section("Findings", out.empty() ? "<p>None.</p>" : out);
}

// Lists the checks with findings and those that were not made; the others are folded.
std::string checks_html(const Json& data) {
  HtmlTable failed("failed checks", {"failed check", "#checked", "#findings"});
  HtmlTable skipped("skipped checks", {"skipped check", "reason"});
  HtmlTable passed("passed checks", {"passed check", "#checked"});
  for (const Json& check : list(data, "checks")) {
    const HtmlCell title = text_cell(text(check, "title")), checked = count_cell(number(check, "looked_at"));
    if (number(check, "findings") > 0)
      failed.add({title, checked, count_cell(number(check, "findings"))});
    else if (const std::string why = text(check, "skipped"); !why.empty())
      skipped.add({title, text_cell(why)});
    else
      passed.add({title, checked});
  }
  std::string out = failed.html() + skipped.html();
  if (passed.rows() > 0)
    out += "<details><summary>" + count_of(passed.rows(), "check") + " passed</summary>" + passed.html() + "</details>";
  return html_section("Checks", out);
}

std::string facts_html(const Json& data) {
  HtmlTable table("facts", {"fact", "result"});
  const auto facts = data.get_object("facts");
  if (!facts) return {};
  for (const Json::Member& fact : *facts)
    if (const auto value = fact.value.as_string()) table.add({text_cell(fact.key), text_cell(*value)});
  return html_section("Facts", table.html());
}

// Lists what was read of each tensor: its digest, its values, the tensor that it was compared with. The script links
// the names with the exponents.
std::string verified_tensors_html(const Json& data) {
  const auto tensors = list(data, "tensors");
  if (tensors.empty()) return {};
  const bool has_values = tensors[0].contains("absmax"), has_other = tensors[0].contains("against_digest");
  std::vector<std::string> heads = {"tensor", "dtype", "shape"};
  if (has_values) heads.insert(heads.end(), {"#absmax", "#zeros", "#NaN", "#infinite"});
  heads.emplace_back("digest");
  if (has_other) heads.insert(heads.end(), {"other digest", "equal"});
  HtmlTable table("tensors", heads);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Json& t = tensors[i];
    const std::string id = "tensor-" + std::to_string(i);
    HtmlCell name = {"<a class=\"link\" href=\"#" + id + "\">" + markup_escaped(text(t, "name")) + "</a>", {}};
    std::vector<HtmlCell> row = {name, text_cell(text(t, "dtype")), text_cell(shape_text(t))};
    if (has_values) {
      row.push_back(real_cell(real(t, "absmax")));
      const double zeros =
          100.0 * static_cast<double>(number(t, "zeros")) / static_cast<double>(std::max<Index>(1, elements(t)));
      row.push_back({real_cell(zeros).html + "%", real_cell(zeros).sort});
      row.push_back(count_cell(number(t, "nan")));
      row.push_back(count_cell(number(t, "inf")));
    }
    row.push_back(name_cell(text(t, "digest")));
    if (has_other) {
      row.push_back(name_cell(text(t, "against_digest")));
      row.push_back(text_cell(is_set(t, "equal") ? "yes" : "no"));
    }
    table.add(row, id);
  }
  return html_section("Tensors", table.html());
}

// Lists the files in the format of sha256sum.
std::string sums_html(const Json& data) {
  std::string lines;
  for (const Json& file : list(data, "files"))
    lines += markup_escaped(text(file, "sha256")) + "  " + markup_escaped(text(file, "path")) + "\n";
  if (lines.empty()) return {};
  return html_section("SHA-256 of files",
                      "<p class=\"hint\">Save these lines as sums.txt in the checkpoint's directory "
                      "and run: sha256sum -c sums.txt</p><pre tabindex=\"0\">" +
                          lines + "</pre>");
}

std::string memory_html(const Json& data) {
  HtmlTable table("memory", {"#stage", "#layers", "#weights", "#gradients", "#optimizer", "#largest rank"});
  const Json* ranks = data.find("ranks");
  if (!ranks) return {};
  for (const Json& stage : list(*ranks, "stages")) {
    const Json* most = stage.find("largest");
    if (!most) continue;
    table.add({count_cell(number(stage, "stage")), count_cell(number(stage, "layers")),
               bytes_cell(number(*most, "weights")), bytes_cell(number(*most, "gradients")),
               bytes_cell(number(*most, "optimizer")), bytes_cell(number(*most, "total"))});
  }
  return html_section("Memory per rank", table.html());
}

std::string paddings_html(const Json& data) {
  HtmlTable table("vocabulary padding", {"framework", "#multiple of", "#rows"});
  for (const Json& p : list(data, "padded_vocabulary"))
    table.add({text_cell(text(p, "framework")), count_cell(number(p, "multiple")), count_cell(number(p, "rows"))});
  return html_section("Vocabulary padding", table.html());
}

Verdict audit_verdict(const Json& data) {
  std::vector<std::string> counts;
  for (const std::string_view severity : {"error", "warning", "note"}) {
    const auto findings = list(data, "findings");
    const auto n =
        std::count_if(findings.begin(), findings.end(), [&](const Json& f) { return text(f, "severity") == severity; });
    counts.push_back(count_of(n, severity));
  }
  const bool ok = is_set(data, "ok");
  return {ok ? Verdict::Kind::kGood : Verdict::Kind::kBad, (ok ? "Passed: " : "Failed: ") + join(counts, ", ")};
}

// ---- inspect

// Lists the tensors of one layout whose names differ only in numbers in one row.
std::string folded_tensors_html(const Json& data) {
  const auto layouts = list(data, "layouts");
  std::vector<std::vector<std::string>> names(layouts.size());
  for (const Json& t : list(data, "tensors")) {
    const auto row = *t.as_array();
    names[*row[2].as_index()].emplace_back(*row[0].as_string());
  }
  HtmlTable table("tensors", {"tensors", "dtype", "shape", "placement", "#bytes of each"});
  for (std::size_t i = 0; i < layouts.size(); ++i)
    for (const std::string& name : fold_names(names[i]))
      table.add({name_cell(name), text_cell(text(layouts[i], "dtype")), text_cell(shape_text(layouts[i])),
                 text_cell(text(layouts[i], "placement")), bytes_cell(number(layouts[i], "bytes"))});
  return html_section("Tensors", table.html());
}

std::string states_html(const Json& data) {
  HtmlTable table("state", {"state", "#tensors", "#elements", "#bytes", "dtypes"});
  const auto kinds = data.get_object("state");
  if (!kinds) return {};
  for (const Json::Member& kind : *kinds)
    if (number(kind.value, "tensors") > 0)
      table.add({text_cell(kind.key), count_cell(number(kind.value, "tensors")),
                 count_cell(number(kind.value, "elements")), bytes_cell(number(kind.value, "bytes")),
                 text_cell(join(texts(kind.value, "dtypes"), ", "))});
  return html_section("State", table.html());
}

std::string mesh_html(const Json& data) {
  HtmlTable table("mesh", {"axis", "#size", "confidence", "evidence"});
  const Json* mesh = data.find("mesh");
  if (!mesh) return {};
  for (const Json& axis : list(*mesh, "axes")) {
    const Json* size = axis.find("size");
    table.add({text_cell(text(axis, "name")),
               size && size->is_integer() ? count_cell(number(axis, "size")) : text_cell("unknown"),
               text_cell(text(axis, "confidence")), text_cell(text(axis, "evidence"))});
  }
  return html_section("Mesh", table.html());
}

std::string files_html(const Json& data) {
  HtmlTable table("files", {"file", "#bytes"});
  const Json* files = data.find("files");
  if (!files) return {};
  for (const Json& file : list(*files, "list")) {
    const auto row = *file.as_array();
    const Index size = *row[1].as_index();
    table.add({name_cell(*row[0].as_string()), size < 0 ? text_cell("missing") : bytes_cell(size)});
  }
  return html_section("Files", table.html());
}

std::string remarks_html(const Json& data) {
  return html_list(texts(data, "problems"), "bad") + html_list(texts(data, "warnings"), "warn") +
         html_list(texts(data, "notes"), "hint");
}

// ---- diff

// How far a tensor changed: its relative distance, or the share of different elements where there is no number.
double change(const Json& tensor) {
  if (tensor.contains("relative_l2")) return real(tensor, "relative_l2");
  return static_cast<double>(number(tensor, "different_elements")) /
         static_cast<double>(std::max<Index>(1, number(tensor, "elements")));
}

// Lists the tensors that changed, the largest changes first. `anchors`: gives each row an id.
std::string changes_table(const Json& data, std::size_t most, bool anchors) {
  std::vector<const Json*> changed;
  for (const Json& t : list(data, "tensors"))
    if (number(t, "different_elements") > 0) changed.push_back(&t);
  std::stable_sort(changed.begin(), changed.end(),
                   [](const Json* a, const Json* b) { return change(*a) > change(*b); });
  HtmlTable table("changes", {"tensor", "#relative L2", "#max |a-b|", "#different elements"});
  for (std::size_t i = 0; i < std::min(changed.size(), most); ++i) {
    const Json& t = *changed[i];
    const bool has_values = t.contains("relative_l2");
    const double share = 100.0 * static_cast<double>(number(t, "different_elements")) /
                         static_cast<double>(std::max<Index>(1, number(t, "elements")));
    table.add({name_cell(text(t, "name")),
               has_values ? real_cell(real(t, "relative_l2")) : text_cell("-"),
               has_values ? real_cell(real(t, "max_abs")) : text_cell("-"),
               {real_cell(share).html + "%", real_cell(share).sort}},
              anchors ? "tensor-" + std::to_string(i) : "");
  }
  return table.html();
}

std::string diff_html(const Json& data) {
  return html_section("Missing on one side", html_list(texts(data, "structure"))) +
         html_section("Different objects", html_list(texts(data, "objects"))) + std::string(kMaps) +
         html_section("Largest changes", changes_table(data, std::numeric_limits<std::size_t>::max(), true)) +
         html_section("Renamed", html_list(texts(data, "renamed"))) +
         html_section("Not compared", html_list(texts(data, "not_compared")));
}

Verdict diff_verdict(const Json& data) {
  const auto tensors = list(data, "tensors");
  const auto differ = std::count_if(tensors.begin(), tensors.end(), [](const Json& t) { return is_set(t, "differs"); });
  const Index missing = std::ssize(list(data, "structure")), objects = std::ssize(list(data, "objects"));
  const std::string compared = count_of(std::ssize(tensors), "tensor") + " compared";
  if (is_set(data, "equal")) return {Verdict::Kind::kGood, "Equal: " + compared};
  std::string out = "Different: " + with_commas(differ) + " of " + compared;
  if (missing > 0) out += ", " + with_commas(missing) + " missing or with another shape";
  if (objects > 0) out += ", " + count_of(objects, "object");
  return {Verdict::Kind::kBad, out};
}

// ---- diff of several steps

// Returns |a - b| / |a| of the model's tensors of each layer in each of `steps`, the data of a diff; kNoValue where a
// layer has no numbers.
std::map<Layer, std::vector<double>> layer_changes(std::span<const Json> steps) {
  std::map<Layer, std::vector<std::optional<RelativeChange>>> sums;
  for (std::size_t i = 0; i < steps.size(); ++i)
    for (const Json& t : list(steps[i], "tensors")) {
      if (text(t, "kind") != "model" || !t.contains("l2")) continue;
      auto& row = sums[layer_of(text(t, "name"))];
      row.resize(steps.size());
      if (!row[i]) row[i].emplace();
      row[i]->add(real(t, "l2"), real(t, "l2_a"));
    }
  std::map<Layer, std::vector<double>> out;
  for (const auto& [layer, row] : sums)
    for (const auto& change : row) out[layer].push_back(change ? change->value() : kNoValue);
  return out;
}

// Names each step after the directory that it leads to; by number if two have the same name.
std::vector<std::string> step_names(std::span<const Json> steps) {
  std::vector<std::string> names, numbers;
  for (const Json& step : steps) {
    names.push_back(base_name(text(step, "b")));
    numbers.push_back(std::to_string(names.size()));
  }
  return std::set(names.begin(), names.end()).size() == names.size() ? names : numbers;
}

// Returns a cell with the name of a layer and a piece of its line, the i-th.
HtmlCell layer_cell(const std::string& name, std::size_t i) {
  const std::string swatch = "<svg class=\"lines swatch\" viewBox=\"0 0 30 10\" aria-hidden=\"true\"><path " +
                             line_style(i) + " d=\"M2 5H28\"/></svg>";
  return {"<span class=\"keyed\">" + swatch + name_cell(name).html + "</span>", name};
}

// Draws how far each layer moved, with a legend that gives the numbers of the steps `shown`.
std::string layers_html(const LineChart& chart, const std::set<std::size_t>& shown, const std::string& hint) {
  std::vector<std::string> heads = {"layer"};
  for (const std::size_t step : shown) heads.push_back("#" + chart.steps[step]);
  HtmlTable table("layers", heads);
  for (std::size_t i = 0; i < chart.lines.size(); ++i) {
    const auto& [name, values] = chart.lines[i];
    std::vector<HtmlCell> row = {layer_cell(name, i)};
    for (const std::size_t step : shown)
      row.push_back(std::isnan(values[step]) ? text_cell("-") : real_cell(values[step]));
    table.add(row);
  }
  if (table.rows() == 0) return {};
  return html_section("Change by layer", "<p class=\"hint\">" + hint + "</p>" + line_chart_html(chart) + table.html());
}

std::string layer_changes_html(std::span<const Json> steps) {
  LineChart chart{"Relative change of each layer by step", step_names(steps), {}};
  std::set<std::size_t> shown;
  for (std::size_t i = 0; i < steps.size(); ++i) shown.insert(i);
  for (const auto& [layer, values] : layer_changes(steps)) chart.lines.push_back({layer_name(layer), values});
  return layers_html(chart, shown,
                     "Relative change |a-b| / |a| of each layer's floating-point model tensors. b is the checkpoint of "
                     "the step, a is the one before it.");
}

std::string step_html(const Json& step) {
  constexpr std::size_t kMostChanges = 100;
  const std::string changes = changes_table(step, kMostChanges, false);
  std::string out = "<p>" + markup_escaped(verdict_of("diff", step).text) + "</p>";
  out += html_list(texts(step, "structure"), "bad");
  if (const std::string objects = html_list(texts(step, "objects"), "bad"); !objects.empty())
    out += "<h3>Different objects</h3>" + objects;
  if (!changes.empty())
    out += "<details><summary>The largest changes, at most " + std::to_string(kMostChanges) + "</summary>" + changes +
           "</details>";
  out += html_list(texts(step, "renamed"), "hint") + html_list(texts(step, "not_compared"), "hint");
  return html_section(text(step, "a") + " \u2192 " + text(step, "b"), out);
}

std::string steps_html(const Json& data) {
  const auto steps = list(data, "steps");
  std::string out = layer_changes_html(steps) + std::string(kMaps);
  for (const Json& step : steps) out += step_html(step);
  return out;
}

Verdict steps_verdict(const Json& data) {
  const auto steps = list(data, "steps");
  const auto differ = std::count_if(steps.begin(), steps.end(), [](const Json& s) { return !is_set(s, "equal"); });
  if (differ == 0) return {Verdict::Kind::kGood, "Equal: " + count_of(std::ssize(steps) + 1, "checkpoint")};
  return {Verdict::Kind::kBad,
          "Different: " + with_commas(differ) + " of " + count_of(std::ssize(steps), "step") + " changed something"};
}

// ---- watch

std::string watched_steps_html(const Json& data) {
  const auto steps = list(data, "steps");
  const bool has_remarks =
      std::any_of(steps.begin(), steps.end(), [](const Json& step) { return step.contains("remark"); });
  std::vector<std::string> heads = {"step",     "state",  "#source",  "#output", "converted (UTC)",
                                    "#seconds", "#moved", "#changed", "since"};
  if (has_remarks) heads.emplace_back("remark");
  HtmlTable table("steps", heads);
  for (const Json& step : steps) {
    const auto cell = [&](const char* key, auto make) { return step.contains(key) ? make(step, key) : text_cell("-"); };
    const auto bytes = [](const Json& s, const char* key) { return bytes_cell(number(s, key)); };
    const auto plain_real = [](const Json& s, const char* key) { return real_cell(real(s, key)); };
    const auto percent = [](const Json& s, const char* key) {
      const HtmlCell share = real_cell(100 * real(s, key));
      return HtmlCell{share.html + "%", share.sort};
    };
    const auto time = [](const Json& s, const char* key) {
      return text_cell(utc_text(number(s, key), "%Y-%m-%d %H:%M:%S"));
    };
    std::vector<HtmlCell> row = {
        name_cell(text(step, "name")), text_cell(text(step, "state")), cell("source_bytes", bytes),
        cell("output_bytes", bytes),   cell("converted", time),        cell("seconds", plain_real),
        cell("moved", plain_real),     cell("changed", percent),       name_cell(text(step, "since"))};
    if (has_remarks) row.push_back(text_cell(text(step, "remark")));
    table.add(row);
  }
  return html_section("Steps", table.html());
}

// Draws how far each layer moved in the steps that have distances, and lists those of the last steps.
std::string watched_layers_html(const Json& data) {
  constexpr std::size_t kColumns = 8;
  const std::vector<std::string> layers = texts(data, "layers");
  const auto steps = list(data, "steps");
  LineChart chart{"Relative change of each layer since the step before", {}, {}};
  std::map<std::size_t, std::size_t> column_of;  // of the steps that have distances
  for (const Json& cell : list(data, "moved")) column_of.emplace(*(*cell.as_array())[1].as_index(), 0);
  std::set<std::size_t> shown;
  for (auto& [step, column] : column_of) {
    column = chart.steps.size();
    chart.steps.push_back(text(steps[step], "name"));
    shown.insert(column);
  }
  while (shown.size() > kColumns) shown.erase(shown.begin());
  for (const std::string& layer : layers)
    chart.lines.push_back({layer, std::vector<double>(chart.steps.size(), kNoValue)});
  for (const Json& cell : list(data, "moved")) {
    const auto row = *cell.as_array();
    const auto value = row[2].as_double();
    chart.lines[*row[0].as_index()].values[column_of.at(*row[1].as_index())] =
        value ? *value : std::numeric_limits<double>::infinity();
  }
  return layers_html(chart, shown,
                     "|a-b| / |a| of the tensors of a layer: b is the step, a is the last step before it whose output "
                     "or source still existed.");
}

Verdict watch_verdict(const Json& data) {
  Index made = 0, kept = 0, failed = 0, incomplete = 0;
  std::string newest;
  for (const Json& step : list(data, "steps")) {
    const std::string state = text(step, "state");
    failed += state == "failed" ? 1 : 0;
    incomplete += state == "incomplete" ? 1 : 0;
    if (!state.starts_with("converted")) continue;
    ++made;
    if (state == "converted") ++kept, newest = text(step, "name");
  }
  std::string out = count_of(made, "step") + " converted";
  if (!newest.empty()) out += ", the newest is " + newest;
  if (kept < made) out += ", " + with_commas(kept) + " kept";
  if (incomplete > 0) out += ", " + with_commas(incomplete) + " not complete yet";
  if (failed > 0) return {Verdict::Kind::kBad, count_of(failed, "step") + " failed; " + out};
  return {made > 0 ? Verdict::Kind::kGood : Verdict::Kind::kNeutral, out};
}

// ---- plan

std::string group_text(const Json& group) {
  const Index more = number(group, "count") - 1;
  return text(group, "first") + (more > 0 ? " and " + with_commas(more) + " more" : "");
}

std::string flows_html(const Json& data) {
  HtmlTable written("files written", {"file written", "#bytes", "#pieces", "#read from"});
  HtmlTable read("files read", {"#column", "file read", "#bytes"});
  std::map<Index, std::pair<Index, Index>> pieces;  // of each target: pieces and sources
  for (const Json& flow : list(data, "flows")) {
    const auto row = *flow.as_array();
    auto& [count, sources] = pieces[*row[0].as_index()];
    count += *row[3].as_index(), ++sources;
  }
  const auto targets = list(data, "targets"), sources = list(data, "sources");
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const auto& [count, from] = pieces[i];
    written.add({name_cell(group_text(targets[i])), bytes_cell(number(targets[i], "bytes")), count_cell(count),
                 count_cell(from)});
  }
  for (std::size_t i = 0; i < sources.size(); ++i)
    read.add({count_cell(i), name_cell(group_text(sources[i])), bytes_cell(number(sources[i], "bytes"))});
  return html_section("Files", written.html() + read.html());
}

std::string left_out_html(const Json& data) {
  HtmlTable table("left out", {"left out", "#tensors", "#objects", "#bytes"});
  for (const Json& l : list(data, "left_out"))
    table.add({text_cell(text(l, "what")), count_cell(number(l, "tensors")), count_cell(number(l, "objects")),
               bytes_cell(number(l, "bytes"))});
  return html_section("Left out", table.html());
}

std::string rank_bytes_html(const Json& data) {
  HtmlTable table("data per rank", {"#rank", "#bytes"});
  const auto bytes = list(data, "rank_bytes");
  if (bytes.size() < 2) return {};
  for (std::size_t i = 0; i < bytes.size(); ++i) table.add({count_cell(i), bytes_cell(*bytes[i].as_index())});
  return plain(html_section("Data per rank", table.html()));
}

}  // namespace

Layer layer_of(std::string_view tensor) {
  for (std::size_t begin = 0; begin < tensor.size();) {
    const std::size_t end = std::min(tensor.find('.', begin), tensor.size());
    if (const auto layer = as_number(tensor.substr(begin, end - begin)))
      return {std::string(tensor.substr(0, begin)), *layer};
    begin = end + 1;
  }
  return {std::string(tensor.substr(0, tensor.rfind('.'))), -1};
}

std::string layer_name(const Layer& layer) {
  return layer.first + (layer.second < 0 ? "" : std::to_string(layer.second));
}

Verdict verdict_of(std::string_view command, const Json& data) {
  if (command == "verify" || command == "check") return audit_verdict(data);
  if (command == "diff") return data.contains("steps") ? steps_verdict(data) : diff_verdict(data);
  if (command == "watch") return watch_verdict(data);
  if (command == "plan")
    return {Verdict::Kind::kNeutral, "Nothing was written: convert would read " +
                                         human_bytes(number(data, "bytes_read")) + " and write " +
                                         human_bytes(number(data, "bytes_written"))};
  if (is_set(data, "complete")) return {Verdict::Kind::kGood, "Complete: no file is missing or too short"};
  return {Verdict::Kind::kBad, "Not complete: files are missing or too short"};
}

std::string report_sections(std::string_view command, const Json& data) {
  if (command == "verify")
    return findings_html(data) + std::string(kMaps) + facts_html(data) + checks_html(data) +
           verified_tensors_html(data) + sums_html(data);
  if (command == "check")
    return findings_html(data) + std::string(kMaps) + plain(memory_html(data)) + paddings_html(data) +
           checks_html(data);
  if (command == "diff") return data.contains("steps") ? steps_html(data) : diff_html(data);
  if (command == "watch") return watched_steps_html(data) + watched_layers_html(data) + std::string(kMaps);
  if (command == "plan")
    return html_section("Remarks", remarks_html(data)) + std::string(kMaps) + flows_html(data) + rank_bytes_html(data) +
           left_out_html(data);
  return html_section("Remarks", remarks_html(data)) + mesh_html(data) + states_html(data) + std::string(kMaps) +
         plain(folded_tensors_html(data)) + plain(files_html(data));
}

}  // namespace reshard::tools
