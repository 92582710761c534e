#pragma once

#include <algorithm>

#include "../cpu/openvino_op.h"

namespace redraft {

// Attributes and inputs that Linear and LinearTopK share.
class ProjectionOp : public Operator {
  public:
    using Operator::Operator;

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("in_features", in_features_);
        visitor.on_attribute("out_features", out_features_);
        visitor.on_attribute("dtype", dtype_);
        visitor.on_attribute("norm_eps", norm_eps_);
        visitor.on_attribute("inputs", inputs_);
        return true;
    }
    int64_t rows_input(std::size_t) const override { return std::max<int64_t>(optional_.find("rows"), 0); }

  protected:
    static const std::vector<std::string>& optional_names() {
        static const std::vector<std::string> names{"scale", "bias", "norm", "residual", "rows", "residual_rows", "ids"};
        return names;
    }

    // Checks inputs; returns the number of rows.
    ov::Dimension check_projection(Activation activation) {
        optional_ = OptionalInputs(inputs_, optional_names(), 2);
        const OptionalInputs& optional = optional_;
        OPENVINO_ASSERT(get_input_size() == optional.end(), get_friendly_name(), " has ", get_input_size(),
                        " inputs: attribute inputs='", inputs_, "' says ", optional.end());
        const int64_t weight_rows = activation == Activation::swiglu ? 2 * out_features_ : out_features_;
        const DType dtype = parse_dtype(dtype_);
        expect_type(this, 0, ov::element::f32);
        expect_type(this, 1, ov::element::u8);
        expect_elements(this, 1, packed_bytes(in_features_, out_features_, dtype, activation));
        OPENVINO_ASSERT(has_scale(dtype) == (optional.find("scale") >= 0), get_friendly_name(),
                        ": int8 weights, and no others, take the input scale");
        const std::pair<const char*, int64_t> vectors[] = {
            {"scale", weight_rows}, {"bias", weight_rows}, {"norm", in_features_}, {"ids", out_features_}};
        for (const auto& [name, elements] : vectors)
            if (optional.find(name) >= 0) expect_elements(this, optional.find(name), elements);
        for (const char* name : {"scale", "bias", "norm", "residual"})
            if (optional.find(name) >= 0) expect_type(this, optional.find(name), ov::element::f32);
        for (const char* name : {"rows", "residual_rows", "ids"})
            if (optional.find(name) >= 0) expect_type(this, optional.find(name), ov::element::i32);
        const ov::PartialShape& x = get_input_partial_shape(0);
        OPENVINO_ASSERT(x.rank().compatible(2) && (x.rank().is_dynamic() || x[1].compatible(in_features_)),
                        get_friendly_name(), ": x has shape ", x, ": expected [rows, ", in_features_, "]");
        const ov::PartialShape& rows = get_input_partial_shape(rows_input(0));
        return rows.rank().is_static() ? rows[0] : ov::Dimension::dynamic();
    }

    Projection projection(const ov::TensorVector& inputs) const {
        const OptionalInputs& optional = optional_;
        const int64_t x_rows = static_cast<int64_t>(inputs[0].get_shape()[0]);
        return {inputs[0].data<const float>(),
                x_rows,
                optional.data<int32_t>(inputs, "rows"),
                static_cast<int64_t>(inputs[rows_input(0)].get_shape()[0]),
                inputs[1].data(),
                optional.data<float>(inputs, "scale"),
                optional.data<float>(inputs, "bias"),
                optional.data<float>(inputs, "norm"),
                norm_eps_,
                in_features_,
                out_features_,
                parse_dtype(dtype_)};
    }

    int64_t in_features_ = 0, out_features_ = 0;
    std::string dtype_ = "fp32", inputs_;
    float norm_eps_ = 1e-5f;
    OptionalInputs optional_;  // of inputs_, parsed when the node is validated
};

}  // namespace redraft
