// SPDX-License-Identifier: Apache-2.0
#include "tools/line_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <utility>

#include "lib/base/checked.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "tools/markup.h"

namespace reshard::tools {
namespace {

// The drawing in units of the SVG, which is scaled to the page's width.
constexpr double kWidth = 760, kHeight = 300, kLeft = 64, kRight = 16, kTop = 10, kBottom = 26;

std::string digits(double x, const char* format = "%.1f") {
  char text[32];
  std::snprintf(text, sizeof text, format, x);
  return text;
}

// Maps values to heights.
struct Scale {
  bool is_logarithmic = false;
  double least = 0, most = 1;  // at the bottom and the top

  double y(double value) const {
    const double share = !is_logarithmic  ? value / most
                         : value <= least ? 0
                                          : std::log(value / least) / std::log(most / least);
    return kTop + (1 - share) * (kHeight - kTop - kBottom);
  }
  // Returns the values of grid lines: powers of ten, or four equal parts.
  std::vector<double> ticks() const {
    std::vector<double> out;
    if (!is_logarithmic) {
      for (int i = 0; i <= 4; ++i) out.push_back(most * i / 4);
      return out;
    }
    const int decades = static_cast<int>(std::lround(std::log10(most / least)));
    const int each = decades / 8 + 1;
    for (int i = 0; i <= decades; i += each) out.push_back(least * std::pow(10.0, i));
    return out;
  }
};

double highest(const LineChart::Line& line) {
  double most = 0;
  for (const double v : line.values)
    if (std::isfinite(v)) most = std::max(most, v);
  return most;
}

// Returns the scale of all values; `most` is 0 if none is above zero.
Scale scale_of(const LineChart& chart) {
  double least = INFINITY, most = 0;
  for (const LineChart::Line& line : chart.lines)
    for (const double v : line.values)
      if (std::isfinite(v) && v > 0) least = std::min(least, v), most = std::max(most, v);
  if (most <= 50 * least) return {.most = most};
  return {true, std::pow(10.0, std::floor(std::log10(least))), std::pow(10.0, std::ceil(std::log10(most)))};
}

std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return "<text x=\"" + digits(x) + "\" y=\"" + digits(y) + "\" text-anchor=\"" + anchor + "\">" +
         markup_escaped(text) + "</text>";
}

std::string grid_svg(const Scale& scale) {
  std::string out;
  for (const double tick : scale.ticks()) {
    const double y = scale.y(tick);
    out += "<path class=\"grid\" d=\"M" + digits(kLeft) + " " + digits(y) + "H" + digits(kWidth - kRight) + "\"/>" +
           text_at(kLeft - 6, y + 4, "end", digits(tick, "%.3g")) + "\n";
  }
  return out;
}

double x_of(std::size_t step, std::size_t steps) {
  const double share = steps < 2 ? 0.5 : static_cast<double>(step) / static_cast<double>(steps - 1);
  return kLeft + 30 + share * (kWidth - kLeft - kRight - 60);
}

// Labels as many steps as there is room for, the first among them.
std::string steps_svg(const std::vector<std::string>& steps) {
  constexpr std::size_t kMostLetters = 14, kMostLabels = 7;
  const std::size_t every = (steps.size() + kMostLabels - 1) / kMostLabels;
  std::string out;
  for (std::size_t i = 0; i < steps.size(); i += every) {
    const std::string& step = steps[i];
    const std::string shown =
        step.size() > kMostLetters ? "\u2026" + valid_utf8(step.substr(step.size() - kMostLetters)) : step;
    out += text_at(x_of(i, steps.size()), kHeight - 6, "middle", shown);
  }
  return out + "\n";
}

std::string line_svg(const LineChart::Line& line, const Scale& scale, const std::string& style) {
  std::string path;
  bool is_drawing = false;
  for (std::size_t i = 0; i < line.values.size(); ++i) {
    const double v = line.values[i];
    if (std::isfinite(v)) {
      // A piece of no length is drawn as a dot, so that a value between two gaps is seen.
      path += (is_drawing ? "L" : "M") + digits(x_of(i, line.values.size())) + " " + digits(scale.y(v));
      if (!is_drawing) path += "h0";
    }
    is_drawing = std::isfinite(v);
  }
  if (path.empty()) return {};
  return "<path class=\"line\" " + style + " d=\"" + path + "\"><title>" + markup_escaped(line.name) +
         "</title></path>\n";
}

// Returns which lines are drawn, in their order.
std::vector<std::size_t> chosen(const std::vector<LineChart::Line>& lines) {
  std::vector<std::size_t> out(lines.size());
  std::iota(out.begin(), out.end(), std::size_t{0});
  if (out.size() <= kMostLines) return out;
  std::stable_sort(out.begin(), out.end(),
                   [&](std::size_t a, std::size_t b) { return highest(lines[a]) > highest(lines[b]); });
  out.resize(kMostLines);
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace

std::string line_style(std::size_t i) {
  // In steps of 3 of 8 hues all of them come, and neighbours are 135 degrees apart.
  constexpr std::size_t kHues = 8, kHueStep = 3;
  constexpr std::array<const char*, 4> kDashes = {"", "8 5", "1 5", "10 5 1 5"};
  const std::size_t hue = (260 + i * kHueStep * 360 / kHues) % 360;
  const std::string dashes = kDashes[i / kHues % kDashes.size()];
  return "stroke=\"oklch(0.6 0.15 " + std::to_string(hue) + ")\"" +
         (dashes.empty() ? "" : " stroke-dasharray=\"" + dashes + "\"");
}

std::string line_chart_html(const LineChart& chart) {
  const Scale scale = scale_of(chart);
  if (!(scale.most > 0)) return {};
  std::string lines;
  const std::vector<std::size_t> drawn = chosen(chart.lines);
  for (const std::size_t i : drawn) lines += line_svg(chart.lines[i], scale, line_style(i));
  std::string caption = scale.is_logarithmic ? "Logarithmic scale; zero is at the bottom." : "Linear scale.";
  if (drawn.size() < chart.lines.size())
    caption += " Drawn are the " + std::to_string(drawn.size()) + " lines of " + with_commas(std::ssize(chart.lines)) +
               " that reach highest.";
  return "<figure><div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"" + markup_escaped(chart.label) +
         "\"><svg class=\"lines\" role=\"img\" aria-label=\"" + markup_escaped(chart.label) + "\" viewBox=\"0 0 " +
         digits(kWidth, "%.0f") + " " + digits(kHeight, "%.0f") + "\">\n" + grid_svg(scale) + steps_svg(chart.steps) +
         lines + "</svg></div><figcaption class=\"hint\">" + caption + "</figcaption></figure>\n";
}

}  // namespace reshard::tools
